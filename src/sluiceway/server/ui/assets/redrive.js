// A redrive in several calls at the requested rate, until it is done, stopped, or the page is closed.
"use strict";
(() => {
  const form = document.getElementById("redrive");
  if (!form) return;
  const part = name => document.getElementById("redrive-" + name);
  const go = part("go"), stop = part("stop"), bar = part("bar"), told = part("told"), problem = part("problem");
  const count = new Intl.NumberFormat();
  const most = Number(form.dataset.most), rate = Number(form.dataset.rate), slice = Number(form.dataset.slice);
  const BUSY = 2000, TRIES = 10;
  let left = most, matched = 0, redriven = 0, running = false, wanted = false, wake = null;
  const targets = new Map();

  const pause = ms => new Promise(done => { const timer = setTimeout(done, ms); wake = () => { clearTimeout(timer); done(); }; });

  function tell(state) {
    const to = [...targets].map(([name, items]) => `${count.format(items)} to ${name}`).join(", ");
    const late = matched > redriven ? ` ${count.format(matched - redriven)} still in transit.` : "";
    bar.value = matched;
    told.textContent = `${state} ${count.format(redriven)} items sent back${to ? ": " + to : ""}.${late}`;
  }

  async function call() {
    const fields = new URLSearchParams(new FormData(form));
    fields.set("limit", Math.min(left, slice));
    const answer = await fetch(form.action, {method: "POST", body: fields, headers: {"Accept": "application/json"}});
    if (answer.status === 401) { location.reload(); throw new Error("sign in again"); }
    return {status: answer.status, said: await answer.json()};
  }

  // Swaps the two buttons and keeps the keyboard focus.
  function show(button, other) {
    const focused = document.activeElement === other;
    button.hidden = false;
    other.hidden = true;
    if (focused) button.focus();
  }

  async function run() {
    running = wanted = true;
    problem.hidden = true;
    part("shown").hidden = false;
    show(stop, go);
    let ended = "Stopped.", busy = 0;
    tell("In progress.");
    try {
      while (wanted) {
        const began = performance.now();
        const {status, said} = await call();
        if ((status === 429 || status === 503) && ++busy < TRIES) {
          // Nothing was done.
          tell("The server is busy; trying again.");
          await pause(BUSY);
          continue;
        }
        if (status !== 200) throw new Error(said.detail || `the server answered ${status}`);
        busy = 0;
        left -= said.matched;
        matched += said.matched;
        redriven += said.redriven;
        for (const [name, items] of Object.entries(said.targets)) targets.set(name, (targets.get(name) || 0) + items);
        if (!said.matched || left <= 0) { ended = "Done."; left = 0; break; }
        tell("In progress.");
        if (rate) await pause(Math.max(0, began + said.matched / rate * 1000 - performance.now()));
      }
    } catch (error) {
      problem.textContent = `Redrive stopped: ${error.message}. Items already sent back stay there. Check the counts, then continue.`;
      problem.hidden = false;
    }
    running = false;
    tell(ended);
    if (left) {
      go.textContent = "Continue with the rest";
      show(go, stop);
    } else {
      stop.hidden = true;
      told.tabIndex = -1;
      told.focus();
    }
  }

  form.addEventListener("submit", event => { event.preventDefault(); if (!running) run(); });
  stop.addEventListener("click", () => { wanted = false; if (wake) wake(); });
  addEventListener("beforeunload", event => { if (running) event.preventDefault(); });
})();
