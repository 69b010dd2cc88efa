// What the pages do beside what htmx does: dialogs, times in the reader's zone, what is said when the connection is lost.
"use strict";
(() => {
  const dialog = document.getElementById("dialog");
  const lost = document.getElementById("lost");
  const live = document.getElementById("live");
  let opener = null;

  // A menu that is a list beside the page on a wide screen, and behind a button on a narrow one.
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

  // Filters of tables: rows whose text has what was typed.
  function filter(input) {
    const wanted = input.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(input.dataset.filter))
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
  }

  // The command line, as the form is filled in; an answer that is overtaken is of a form that is not so any more.
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
  });
  document.addEventListener("click", event => {
    const link = event.target.closest("[role=button][hx-get]");
    if (link) opener = link.id || link.getAttribute("href");
    if (event.target.closest("[data-close]") && dialog.open) { event.preventDefault(); dialog.close(); }
  });
  // A link that is a button is pressed like one.
  document.addEventListener("keydown", event => {
    if (event.key === " " && event.target.matches("a[role=button]")) { event.preventDefault(); event.target.click(); }
  });
  dialog.addEventListener("close", () => {
    dialog.replaceChildren();
    // The page may have been made anew meanwhile, so it is looked for.
    const back = [...document.querySelectorAll("[role=button][hx-get]")].find(each => (each.id || each.getAttribute("href")) === opener);
    if (back) back.focus();
  });

  // A page goes on by a stream. htmx begins one again that it has had; the first one is begun again here.
  let streams = false, tries = 0;
  function again() {
    lost.hidden = false;
    setTimeout(
      () => htmx.ajax("GET", live.getAttribute("hx-sse:connect"), {source: live}),
      Math.min(5000, 500 * 2 ** tries++) * (0.7 + 0.6 * Math.random()));
  }
  document.addEventListener("htmx:sse:after:connection", () => { streams = true; lost.hidden = true; });
  document.addEventListener("htmx:sse:error", event => {
    // Who has to say who they are finds out where by asking for the page.
    if (event.detail.status === 401) { location.reload(); return; }
    lost.hidden = false;
  });

  // What was asked for in the dialog, and has no answer: nobody knows whether it was done.
  function unanswered(why, sent) {
    const told = document.createElement("p");
    told.id = "unanswered";
    told.className = "banner bad";
    told.setAttribute("role", "alert");
    told.textContent = `${why} ${sent ? "It may or may not have been done: look before you repeat it." : "Nothing was done; try again."}`;
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
    // An answer to who has to sign in says where.
    if (response.status === 401) return;
    if (sourceElement === live) {
      if (type.startsWith("text/event-stream")) return;
      event.preventDefault();
      again();
    } else if (!type.startsWith("text/html") || !response.headers.has("X-Request-Id")) {
      event.preventDefault();
      unanswered(`The server answered with ${response.status}, which is no page.`, request.method === "POST");
    }
  });
  document.addEventListener("htmx:error", event => {
    const ctx = event.detail.ctx;
    if (!ctx) return;
    if (ctx.sourceElement !== live) unanswered("There is no answer from the server.", ctx.request.method === "POST");
    else if (!streams) again();
  });

  let held = false;
  document.addEventListener("htmx:before:swap", () => { held = live.contains(document.activeElement); });
  document.addEventListener("htmx:after:swap", event => {
    if (event.detail.ctx.sourceElement === live) {
      // What has taken the place of what had the focus is told to whoever was there.
      if (held && document.activeElement === document.body) live.querySelector(".problem [tabindex]")?.focus();
    } else if (!dialog.open) {
      dialog.showModal();
    } else {
      (dialog.querySelector("[aria-invalid=true]") || dialog.querySelector("[tabindex]"))?.focus();
    }
    redraw();
  });

  // What the reader has opened stays open when what is around it changes.
  htmx.registerExtension("keep", {
    htmx_before_morph_attr: (element, detail) => !(detail.attrName === "open" && element.matches("details, dialog")),
  });
  redraw();
})();
