// Page behaviour beyond htmx: dialogs, times in the reader's zone, the notice of a lost connection.
"use strict";
(() => {
  const dialog = document.getElementById("dialog");
  const lost = document.getElementById("lost");
  const live = document.getElementById("live");
  let opener = null;

  // The menu: a sidebar on wide screens, behind a button on narrow ones.
  const menu = document.getElementById("menu");
  const wide = matchMedia("(min-width: 60rem)");
  const spread = () => { if (menu) menu.open = wide.matches; };
  wide.addEventListener("change", spread);
  spread();

  const zone = new Intl.DateTimeFormat(undefined, {dateStyle: "short", timeStyle: "medium"});
  function times(root) {
    for (const each of root.querySelectorAll("time[datetime]")) {
      const at = new Date(each.dateTime);
      if (isNaN(at)) continue;
      const said = zone.format(at);
      if (each.textContent !== said) { each.textContent = said; each.title = each.dateTime; }
    }
  }

  // Table filters: hide the rows that do not contain the typed text.
  function filter(input) {
    const wanted = input.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(input.dataset.filter))
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
  }

  // The equivalent command, updated as the form is filled in. Answers that arrive late are dropped.
  let lines = 0;
  function line(form) {
    const shown = form.querySelector("#cli"), mine = ++lines;
    if (!shown) return;
    fetch(form.action.replace("/ui/do/", "/ui/line/") + "?" + new URLSearchParams(new FormData(form)), {headers: {"HX-Request": "true"}})
      .then(answer => answer.ok ? answer.text() : null)
      .then(text => { if (text !== null && mine === lines) shown.textContent = text; })
      .catch(() => {});
  }

  function redraw() {
    times(document);
    for (const each of document.querySelectorAll("input[data-filter]")) filter(each);
    document.dispatchEvent(new CustomEvent("ui:shown"));
  }

  document.addEventListener("input", event => {
    if (event.target.matches("input[data-filter]")) filter(event.target);
    const form = event.target.closest("form.ask");
    if (form) line(form);
    if (event.target.matches("input[data-all]"))
      for (const each of document.querySelectorAll(`#${event.target.dataset.all} tbody input[type=checkbox]`)) each.checked = event.target.checked;
  });
  document.addEventListener("click", event => {
    const link = event.target.closest("[role=button][hx-get]");
    if (link) opener = link.id || link.getAttribute("href");
    if (event.target.closest("[data-close]") && dialog.open) { event.preventDefault(); dialog.close(); }
  });
  // Space activates a link with the role of a button.
  document.addEventListener("keydown", event => {
    if (event.key === " " && event.target.matches("a[role=button]")) { event.preventDefault(); event.target.click(); }
  });
  dialog.addEventListener("close", () => {
    dialog.replaceChildren();
    // The page may have been replaced meanwhile, so the opener is looked up again.
    const back = [...document.querySelectorAll("[role=button][hx-get]")].find(each => (each.id || each.getAttribute("href")) === opener);
    if (back) back.focus();
  });

  // Live updates come by a stream. htmx reconnects a stream that was open; the first connection is retried here.
  let streams = false, tries = 0;
  function again() {
    lost.hidden = false;
    setTimeout(
      () => htmx.ajax("GET", live.getAttribute("hx-sse:connect"), {source: live}),
      Math.min(5000, 500 * 2 ** tries++) * (0.7 + 0.6 * Math.random()));
  }
  document.addEventListener("htmx:sse:after:connection", () => { streams = true; lost.hidden = true; });
  document.addEventListener("htmx:sse:error", event => {
    // Loading the page leads to the sign-in form.
    if (event.detail.status === 401) { location.reload(); return; }
    lost.hidden = false;
  });

  // A request of the dialog without an answer: its outcome is unknown.
  function unanswered(why, sent) {
    const told = document.createElement("p");
    told.id = "unanswered";
    told.className = "banner bad";
    told.setAttribute("role", "alert");
    told.textContent = `${why} ${sent ? "The change may or may not have been made. Check before you repeat it." : "Nothing changed. Try again."}`;
    const form = dialog.querySelector("form");
    if (form) {
      form.querySelector("#unanswered")?.remove();
      form.append(told);
      told.scrollIntoView({block: "nearest"});
      return;
    }
    const title = document.createElement("h2"), close = document.createElement("button");
    title.id = "dialog-title";
    title.textContent = "No answer";
    close.className = "button";
    close.textContent = "Close";
    close.dataset.close = "";
    dialog.replaceChildren(title, told, close);
    if (!dialog.open) dialog.showModal();
  }

  document.addEventListener("htmx:before:response", event => {
    const {sourceElement, request, response} = event.detail.ctx;
    const type = response.headers.get("Content-Type") || "";
    // Such an answer redirects to the sign-in form.
    if (response.status === 401) return;
    if (sourceElement === live) {
      if (type.startsWith("text/event-stream")) return;
      event.preventDefault();
      again();
    } else if (!type.startsWith("text/html") || !response.headers.has("X-Request-Id")) {
      event.preventDefault();
      unanswered(`Unexpected answer from the server (${response.status}).`, request.method === "POST");
    }
  });
  document.addEventListener("htmx:error", event => {
    const ctx = event.detail.ctx;
    if (!ctx) return;
    if (ctx.sourceElement !== live) unanswered("No answer from the server.", ctx.request.method === "POST");
    else if (!streams) again();
  });

  let held = false;
  document.addEventListener("htmx:before:swap", () => { held = live.contains(document.activeElement); });
  document.addEventListener("htmx:after:swap", event => {
    if (event.detail.ctx.sourceElement === live) {
      // If the focused element was replaced by a problem, the focus moves there.
      if (held && document.activeElement === document.body) live.querySelector(".problem [tabindex]")?.focus();
    } else if (!dialog.open) {
      dialog.showModal();
    } else {
      (dialog.querySelector("[aria-invalid=true]") || dialog.querySelector("[tabindex]"))?.focus();
    }
    redraw();
  });

  // Details that the reader has opened stay open across updates.
  htmx.registerExtension("keep", {
    htmx_before_morph_attr: (element, detail) => !(detail.attrName === "open" && element.matches("details, dialog")),
  });
  redraw();
})();
