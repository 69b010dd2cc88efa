// What the pages do beside what htmx does: dialogs, times in the reader's zone, what is said when the connection is lost.
"use strict";
(() => {
  const dialog = document.getElementById("dialog");
  const lost = document.getElementById("lost");
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

  // The command line, as the form is filled in.
  function line(form) {
    const shown = form.querySelector("#cli");
    if (!shown) return;
    fetch(form.action.replace("/ui/do/", "/ui/line/") + "?" + new URLSearchParams(new FormData(form)), {headers: {"HX-Request": "true"}})
      .then(answer => answer.ok ? answer.text() : null)
      .then(text => { if (text !== null) shown.textContent = text; })
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

  document.addEventListener("htmx:after:swap", () => {
    if (dialog.childElementCount && !dialog.open) dialog.showModal();
    redraw();
  });
  document.addEventListener("htmx:sse:after:connection", () => { lost.hidden = true; });
  document.addEventListener("htmx:sse:error", event => {
    // Who has to say who they are finds out where by asking for the page.
    if (event.detail.status === 401) { location.reload(); return; }
    lost.hidden = false;
  });
  document.addEventListener("htmx:error", () => { if (dialog.open) return; lost.hidden = false; });

  // What the reader has opened stays open when what is around it changes.
  htmx.registerExtension("keep", {
    htmx_before_morph_attr: (element, detail) => !(detail.attrName === "open" && element.matches("details, dialog")),
  });
  redraw();
})();
