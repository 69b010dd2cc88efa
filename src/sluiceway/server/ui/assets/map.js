// The partition map: draws the page's data island as vessels in the columns of their backends.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const LOOKS = {available: ["●", "good"], preparing: ["◌", "busy"], draining: ["▼", "busy"], paused: ["❚❚", "warn"], unavailable: ["✖", "bad"],
    error: ["✖", "bad"], planned: ["+", "busy"], going: ["▼", "warn"]};
  // Tile sizes: all facts, the number alone, and the smallest clickable size.
  const SIZES = [{name: "large", up: 40, w: 140, h: 96, gap: 16, column: 188}, {name: "medium", up: 240, w: 60, h: 50, gap: 10, column: 164},
    {name: "small", up: Infinity, w: 24, h: 24, gap: 3, column: 132}];
  const HEAD = 64, PAD = 12, APART = 14;
  const SPAN = 10_000, KEPT = 20_000;
  const MOST_ARROWS = 16;

  const number = new Intl.NumberFormat();
  const past = new Map();
  let map = null;

  function make(name, attributes, parent, text) {
    const made = document.createElementNS(NS, name);
    set(made, attributes);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  function set(element, attributes) {
    for (const [name, value] of Object.entries(attributes)) if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  function html(name, parent, text = "", kind = "") {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (kind) made.className = kind;
    parent.append(made);
    return made;
  }

  // ---- data ----

  function read(data) {
    const drains = new Set(data.moving ? data.moving.drains : []);
    const going = new Set(data.plan ? data.plan.drains : []);
    const parts = data.parts.map(([partition, backend, state, owner, parents, ready, leased, scheduled, transferring, moved, movedIn, commit, degraded]) => ({
      partition, backend, state, owner, parents, ready, leased, scheduled, transferring, moved, movedIn, commit, degraded,
      left: ready === null ? null : ready + leased + scheduled + transferring, drains: drains.has(partition), going: going.has(partition),
    }));
    for (const [partition, backend, parents] of (data.plan ? data.plan.creates : []).map(each => [each.partition, each.backend, each.parents]))
      parts.push({partition, backend, parents, state: "planned", owner: null, left: null, ready: null, drains: false, going: false});
    const backends = [...data.backends];
    for (const part of parts)
      if (!backends.some(each => each.backend === part.backend)) backends.push({backend: part.backend, kind: null, partition_affinity: null, problem: null});
    return {...data, parts, backends, by: new Map(parts.map(part => [part.partition, part]))};
  }

  // Records the counts that this page has seen, for rates over SPAN.
  function note(state) {
    if (!document.getElementById("lost").hidden) return;
    const now = performance.now();
    for (const part of state.parts) {
      if (part.left === null) continue;
      const seen = past.get(part.partition) || [];
      const last = seen[seen.length - 1];
      if (!last || now - last.at > 400) seen.push({at: now, left: part.left, movedIn: part.movedIn});
      while (seen.length > 2 && seen[1].at < now - SPAN) seen.shift();
      past.set(part.partition, seen);
    }
    for (const [partition, seen] of past)
      if (!state.by.has(partition) && seen[seen.length - 1].at < now - KEPT) past.delete(partition);
  }
  function rate(partition, count, sign) {
    const seen = past.get(partition);
    if (!seen) return null;
    const [first, last] = [seen[0], seen[seen.length - 1]];
    return last.at - first.at < SPAN * .95 ? null : Math.max(0, sign * (last[count] - first[count]) * 1000 / (last.at - first.at));
  }
  // Whether items have left it recently; known sooner than the rate.
  function flows(partition) {
    const seen = past.get(partition);
    return Boolean(seen) && seen[0].left > seen[seen.length - 1].left;
  }
  const drained = partition => rate(partition, "left", -1);
  const filled = partition => map && map.state.moving ? rate(partition, "movedIn", 1) : null;

  function perSecond(value) { return value === null ? "–" : `${value >= 10 || value === 0 ? number.format(Math.round(value)) : value.toFixed(1)}/s`; }
  function span(seconds) {
    if (seconds === null || !isFinite(seconds)) return "–";
    const whole = Math.ceil(seconds);
    const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]].filter(([count]) => count);
    return parts.length ? parts.slice(0, 2).map(([count, unit]) => `${count} ${unit}`).join(" ") : "0 s";
  }
  const leftFor = (left, by) => left === 0 ? "0 s" : span(by ? left / by : null);
  const brief = owner => owner.replace(/^instance-/, "");
  const items = count => `${number.format(count)} ${count === 1 ? "item" : "items"}`;

  // The spoken label: the tile's texts in order, then the facts that do not fit on it.
  function label(state, part) {
    const start = `Partition ${part.partition}, ${part.going ? "would drain" : part.state}`;
    if (part.state === "planned") return `${start}, ${lined(state, part)[0]}, on ${part.backend}`;
    const counts = part.left === null ? "counts unknown"
      : `${number.format(part.ready)} ready, ${number.format(part.leased)} leased, ${number.format(part.scheduled)} scheduled`;
    return `${start}, ${lined(state, part).filter(Boolean).join(", ")}; ${counts}, on ${part.backend}, owner ${part.owner || "none"}`;
  }

  // ---- layout ----

  function layout(state, width) {
    const size = SIZES.find(each => state.parts.length <= each.up);
    const inRow = Math.max(1, Math.min(state.backends.length, Math.floor((width + APART) / (size.column + APART))));
    const column = (width - APART * (inRow - 1)) / inRow;
    const across = Math.max(1, Math.floor((column - 2 * PAD + size.gap) / (size.w + size.gap)));
    const w = size.name === "small" ? size.w : (column - 2 * PAD - size.gap * (across - 1)) / across;
    const places = new Map(), columns = [];
    let top = 0;
    for (let first = 0; first < state.backends.length; first += inRow) {
      let tallest = 0;
      state.backends.slice(first, first + inRow).forEach((backend, at) => {
        const own = state.parts.filter(part => part.backend === backend.backend);
        const x = at * (column + APART), rows = Math.ceil(own.length / across);
        own.forEach((part, nth) => places.set(part.partition,
          {x: x + PAD + (nth % across) * (w + size.gap), y: top + HEAD + Math.floor(nth / across) * (size.h + size.gap), w, h: size.h, band: first}));
        columns.push({backend, own, x, y: top, w: column});
        tallest = Math.max(tallest, HEAD + (rows ? rows * (size.h + size.gap) - size.gap + PAD : 0));
      });
      for (const each of columns.slice(first)) each.h = tallest;
      top += tallest + APART;
    }
    return {size, places, columns, width, height: Math.max(0, top - APART), w};
  }

  // ---- drawing ----

  function begin(box) {
    const canvas = html("div", box, "", "map-canvas");
    const detail = html("aside", box, "", "map-detail");
    detail.setAttribute("aria-label", "Selected partition");
    const spoken = html("p", box, "", "map-spoken");
    spoken.setAttribute("role", "status");
    const svg = make("svg", {role: "listbox", "aria-label": "Partitions by backend", "aria-orientation": "horizontal", class: "map-svg"}, canvas);
    const defs = make("defs", {}, svg);
    const clip = make("rect", {rx: 7, x: 0, y: 0}, make("clipPath", {id: "map-vessel"}, defs));
    const stripes = make("pattern", {id: "map-leased", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"}, defs);
    make("rect", {width: 8, height: 8, class: "deep"}, stripes);
    make("rect", {width: 3, height: 8, class: "stripe"}, stripes);
    const dots = make("pattern", {id: "map-scheduled", width: 8, height: 8, patternUnits: "userSpaceOnUse"}, defs);
    make("rect", {width: 8, height: 8, class: "shallow"}, dots);
    make("circle", {cx: 4, cy: 4, r: 1.2, class: "dot"}, dots);
    const head = make("marker", {id: "map-head", viewBox: "0 0 10 10", refX: 8, refY: 5, markerWidth: 11, markerHeight: 11, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse"}, defs);
    make("path", {d: "M0 0L10 5L0 10Z", class: "head"}, head);
    const columns = make("g", {role: "presentation"}, svg);
    const arrows = make("g", {class: "arrows", "aria-hidden": "true"}, svg);
    map = {box, canvas, detail, spoken, svg, clip, columns, arrows, groups: new Map(), tiles: new Map(), chosen: null, state: null, found: null};
    svg.addEventListener("keydown", steer);
    for (const kind of ["click", "focusin"])
      svg.addEventListener(kind, event => { const tile = event.target.closest(".tile"); if (tile) choose(Number(tile.dataset.partition), kind === "click"); });
    new ResizeObserver(() => draw()).observe(canvas);
    legend(canvas);
  }

  function legend(canvas) {
    const list = html("ul", canvas, "", "map-legend");
    for (const [kind, text] of [["ready", "ready"], ["leased", "leased"], ["scheduled", "scheduled"]]) {
      const sample = make("svg", {width: 18, height: 14, "aria-hidden": "true"}, html("li", list));
      make("rect", {width: 18, height: 14, rx: 3, class: `water ${kind}`}, sample);
      sample.after(` ${text}`);
    }
    map.fullest = html("li", list);
    map.meaning = html("li", list);
  }

  function columnOf(name) {
    let group = map.groups.get(name);
    if (!group) {
      const g = make("g", {role: "group", class: "column"}, map.columns);
      group = {g, card: make("rect", {rx: 10, class: "card", "aria-hidden": "true"}, g)};
      for (const [line, y] of [["name", 22], ["about", 42]]) group[line] = make("text", {class: `col-${line}`, x: PAD, y, "aria-hidden": "true"}, g);
      group.tiles = make("g", {role: "presentation"}, g);
      map.groups.set(name, group);
    }
    return group;
  }

  function drawColumn({backend, own, x, y, w, h}) {
    const group = columnOf(backend.backend);
    const count = own.filter(part => part.state !== "planned").length;
    const affinity = backend.partition_affinity;
    const about = backend.problem ? `✖ ${backend.problem}` : [affinity === null ? backend.kind : affinity === 0 ? "affinity 0: no new partitions" : `affinity ${affinity}`, `${number.format(count)} here`].filter(Boolean).join(" · ");
    set(group.g, {"aria-label": `Backend ${backend.backend}, ${about}`});
    set(group.card, {x, y, width: w, height: h, class: backend.problem ? "card bad" : affinity === 0 ? "card closed" : "card"});
    fit(group.name, backend.backend, x + PAD, y + 24, w - 2 * PAD, 8.2);
    fit(group.about, about, x + PAD, y + 44, w - 2 * PAD, 6.4);
    group.about.classList.toggle("bad", Boolean(backend.problem));
    return group;
  }

  // Truncates the text to its room; the title has all of it.
  function fit(text, full, x, y, room, each) {
    set(text, {x, y});
    const most = Math.max(3, Math.floor(room / each));
    const shown = full.length > most ? full.slice(0, most - 1) + "…" : full;
    if (text.dataset.full !== full || text.dataset.shown !== shown) {
      text.textContent = shown;
      if (shown !== full) make("title", {}, text, full);
      text.dataset.full = full; text.dataset.shown = shown;
    }
  }

  function tileOf(part) {
    let tile = map.tiles.get(part.partition);
    if (!tile) {
      const g = make("g", {role: "option", tabindex: -1, id: `tile-${part.partition}`, "data-partition": part.partition, "aria-selected": "false"});
      tile = {g, ground: make("rect", {rx: 7, class: "vessel"}, g)};
      const inside = make("g", {"clip-path": "url(#map-vessel)"}, g);
      for (const layer of ["scheduled", "ready", "leased"]) tile[layer] = make("path", {class: `water ${layer}`}, inside);
      tile.edge = make("rect", {rx: 7, class: "edge"}, g);
      for (const line of ["no", "icon", "one", "two", "three"]) tile[line] = make("text", {class: `t-${line}`}, g);
      map.tiles.set(part.partition, tile);
    }
    return tile;
  }

  function wave(w, h, size) {
    if (size.name === "small") return `M0 0H${w}V${h + 4}H0Z`;
    const step = w / 4;
    return `M0 0q${step / 2} -4 ${step} 0t${step} 0t${step} 0t${step} 0V${h + 6}H0Z`;
  }

  function drawTile(state, part, place, size, full) {
    const tile = tileOf(part), {w, h} = place;
    const look = part.going ? "going" : LOOKS[part.state] ? part.state : "unavailable";
    set(tile.g, {class: `tile ${look} ${size.name}`, "aria-label": label(state, part)});
    tile.g.style.transform = `translate(${place.x}px, ${place.y}px)`;
    for (const rect of [tile.ground, tile.edge]) set(rect, {width: w, height: h});
    const path = wave(w, h, size);
    let level = 0;
    for (const layer of ["leased", "ready", "scheduled"]) {
      level += part[layer] || 0;
      set(tile[layer], {d: path});
      // A few items stay visible.
      const high = part[layer] ? Math.max(h * level / full, 4) : -5;
      tile[layer].style.transform = `translateY(${h - high}px)`;
    }
    words(state, tile, part, look, size, w, h);
  }

  function words(state, tile, part, look, size, w, h) {
    const [icon] = LOOKS[look];
    const said = look === "going" ? "would drain" : look;
    const large = size.name === "large";
    set(tile.no, {x: large ? 9 : w / 2, y: large ? 21 : 20, "text-anchor": large ? "start" : "middle"});
    set(tile.icon, large ? {x: w - 9, y: 20, "text-anchor": "end"} : {x: w / 2, y: size.name === "small" ? 16 : 40, "text-anchor": "middle"});
    // Screen readers join the texts, so each ends with a space.
    say(tile.no, size.name === "small" ? "" : `${part.partition} `);
    // A small tile in its normal state has no icon.
    say(tile.icon, large ? `${icon} ${said} ` : size.name === "small" && look === "available" ? "" : icon);
    const lines = large ? lined(state, part) : ["", "", ""];
    ["one", "two", "three"].forEach((name, nth) => {
      set(tile[name], {x: 9, y: 46 + nth * 19});
      const most = Math.floor((w - 16) / (nth ? 6.6 : 8));
      say(tile[name], lines[nth].length > most ? `${lines[nth].slice(0, most - 1)}…` : `${lines[nth]} `);
    });
  }

  function lined(state, part) {
    if (part.state === "planned") return [part.parents.length ? `replaces ${part.parents.join(", ")}` : "added", "", ""];
    const count = part.left === null ? "–" : items(part.left);
    if (part.drains && part.state === "draining") {
      const by = drained(part.partition);
      if (part.left === null) return ["–", "", ""];
      const waits = part.left > 0 && part.left === part.leased;
      return [`${number.format(part.left)} left`, waits ? "all leased: waiting" : `${by === null ? "–/s" : perSecond(by)} · ${leftFor(part.left, by)}`,
        state.moving.drain === "copy" ? `→ ${heirs(state, part).join(", ") || "others"}` : "→ consumers"];
    }
    const coming = filled(part.partition);
    const came = coming ? `+${perSecond(coming)} moved in` : part.leased ? `${number.format(part.leased)} leased` : "";
    return [count, came, part.owner ? `on ${brief(part.owner)}` : "no owner"];
  }

  const heirs = (state, part) => state.parts.filter(other => other.parents.includes(part.partition)).map(other => other.partition);

  // Arrows from a draining partition to its replacements, or to the partitions that receive its items.
  function pairs(state) {
    const found = [];
    const copies = state.moving && state.moving.drain === "copy";
    const receiving = copies ? state.parts.filter(part => !part.drains && filled(part.partition) > 0).map(part => part.partition) : [];
    for (const part of state.parts) {
      if (!(part.drains && part.state === "draining") && !part.going) continue;
      const own = heirs(state, part);
      const kind = part.going ? "plan" : copies ? "copy" : "natural";
      for (const to of own.length ? own : part.going ? [] : receiving) found.push({from: part.partition, to, kind});
    }
    map.few = found.length <= MOST_ARROWS;
    return map.few ? found : found.filter(each => each.from === map.chosen || each.to === map.chosen).slice(0, MOST_ARROWS);
  }

  function drawArrows(state, {places, size: {gap}}) {
    const wanted = pairs(state);
    while (map.arrows.children.length > wanted.length) map.arrows.lastChild.remove();
    wanted.forEach((pair, nth) => {
      const g = map.arrows.children[nth] || make("g", {}, map.arrows);
      if (!g.firstChild) { make("path", {class: "halo"}, g); make("path", {class: "flow", "marker-end": "url(#map-head)"}, g); }
      const chosen = pair.from === map.chosen || pair.to === map.chosen;
      set(g, {class: `arrow ${pair.kind}${chosen ? " chosen" : ""}${flows(pair.from) ? " flows" : ""}`});
      for (const path of g.children) set(path, {d: channel(places.get(pair.from), places.get(pair.to), nth, gap)});
    });
  }

  // Routes an arrow through the gaps between tiles; parallel arrows get lanes.
  function channel(a, b, nth, gap) {
    const lane = (nth % 3 - 1) * Math.min(4, gap / 5);
    const way = b.x > a.x + a.w / 2 ? 1 : b.x < a.x - a.w / 2 ? -1 : 0;
    const side = way || 1, out = side > 0 ? a.x + a.w : a.x, level = a.y + a.h / 2 + lane, at = b.y + b.h / 2 + lane;
    const leave = out + side * (gap / 2) + lane;
    const enter = (way > 0 ? b.x : b.x + b.w) - way * 3;
    if (way && Math.abs(enter - out) <= 2 * PAD + APART) {
      const middle = (enter + out) / 2 + lane * 2;
      return rounded([[out, level], [middle, level], [middle, at], [enter, at]]);
    }
    if (gap < 8) return `M${a.x + a.w / 2} ${a.y + a.h / 2}L${b.x + b.w / 2} ${b.y + b.h / 2}`;
    const over = b.y - gap / 2 + lane;
    if (way && a.band === b.band) {
      const turn = enter - way * (gap / 2 + 4) + lane;
      return rounded([[out, level], [leave, level], [leave, over], [turn, over], [turn, at], [enter, at]]);
    }
    const middle = b.x + b.w / 2 + lane * 3;
    return rounded([[out, level], [leave, level], [leave, over - 3], [middle, over - 3], [middle, b.y - 2]]);
  }

  function rounded(points) {
    let path = `M${points[0].join(" ")}`;
    for (let nth = 1; nth < points.length - 1; nth++) {
      const [before, at, after] = [points[nth - 1], points[nth], points[nth + 1]];
      const bend = other => {
        const far = Math.hypot(other[0] - at[0], other[1] - at[1]) || 1, by = Math.min(7, far / 2) / far;
        return [at[0] + (other[0] - at[0]) * by, at[1] + (other[1] - at[1]) * by];
      };
      path += `L${bend(before).join(" ")}Q${at.join(" ")} ${bend(after).join(" ")}`;
    }
    return `${path}L${points[points.length - 1].join(" ")}`;
  }

  function draw() {
    if (!map || !map.state || !map.canvas.isConnected) return;
    const state = map.state, width = Math.floor(map.canvas.clientWidth);
    if (width < 50) return;
    const found = layout(state, width);
    map.found = found;
    set(map.svg, {width, height: found.height, viewBox: `0 0 ${width} ${found.height}`});
    set(map.clip, {width: found.w, height: found.size.h});
    const most = Math.max(0, ...state.parts.map(part => (part.ready || 0) + (part.leased || 0) + (part.scheduled || 0)));
    for (const column of found.columns) {
      const group = drawColumn(column);
      column.own.forEach((part, nth) => {
        drawTile(state, part, found.places.get(part.partition), found.size, most || 1);
        const g = map.tiles.get(part.partition).g;
        if (group.tiles.children[nth] !== g) group.tiles.insertBefore(g, group.tiles.children[nth] || null);
      });
    }
    tidy(state);
    drawArrows(state, found);
    say(map.fullest, most ? `full vessel = fullest partition: ${items(most)}` : "all partitions are empty");
    const means = state.plan ? "planned replacements" : state.moving && state.moving.drain === "copy" ? "item moves" : "replacements";
    say(map.meaning, map.few && !map.arrows.childElementCount ? "" : `arrows${map.few ? "" : " of the selected partition"}: ${means}`);
    drawDetail();
  }

  // Removes vanished backends and partitions; the selection moves to a replacement.
  function tidy(state) {
    const hadFocus = map.svg.contains(document.activeElement);
    for (const [name, group] of map.groups)
      if (!state.backends.some(each => each.backend === name)) { group.g.remove(); map.groups.delete(name); }
    for (const [partition, tile] of map.tiles) if (!state.by.has(partition)) { tile.g.remove(); map.tiles.delete(partition); }
    if (map.chosen !== null && !state.by.has(map.chosen)) {
      map.spoken.textContent = `Partition ${map.chosen} was removed.`;
      const heir = state.parts.find(part => part.parents.includes(map.chosen)) || state.parts[0];
      map.chosen = null;
      if (heir) choose(heir.partition, hadFocus);
    } else if (map.chosen === null && state.parts.length) choose((state.parts.find(part => part.drains || part.going) || state.parts[0]).partition, false);
  }

  // ---- selection ----

  function choose(partition, focus) {
    const tile = map.tiles.get(partition), before = map.tiles.get(map.chosen);
    if (!tile) return;
    if (map.chosen !== partition) {
      if (before) set(before.g, {tabindex: -1, "aria-selected": "false"});
      set(tile.g, {tabindex: 0, "aria-selected": "true"});
      map.chosen = partition;
      map.told = null;
      if (map.found) { drawArrows(map.state, map.found); drawDetail(); }
    }
    if (focus) tile.g.focus();
  }

  function steer(event) {
    const order = [...map.svg.querySelectorAll(".tile")].map(each => Number(each.dataset.partition));
    const at = order.indexOf(map.chosen), here = map.found.places.get(map.chosen);
    let next = null;
    if (event.key === "ArrowRight") next = order[at + 1];
    else if (event.key === "ArrowLeft") next = order[at - 1];
    else if (event.key === "Home") next = order[0];
    else if (event.key === "End") next = order[order.length - 1];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = nearest(here, event.key === "ArrowDown" ? 1 : -1);
    else return;
    event.preventDefault();
    if (next != null) choose(next, true);
  }

  function nearest(here, way) {
    let best = null, least = Infinity;
    for (const [partition, place] of map.found.places) {
      const down = (place.y - here.y) * way;
      if (down <= 0) continue;
      const far = down + 3 * Math.abs(place.x - here.x);
      if (far < least) { least = far; best = partition; }
    }
    return best;
  }

  function drawDetail() {
    const state = map.state, part = state && state.by.get(map.chosen);
    if (!part) return;
    const facts = factsOf(state, part), names = facts.map(([name]) => name).join();
    if (map.detail.dataset.of !== `${part.partition}:${names}`) {
      map.detail.replaceChildren();
      map.detail.dataset.of = `${part.partition}:${names}`;
      html("h2", map.detail, `Partition ${part.partition}`);
      const list = html("dl", map.detail);
      for (const [name] of facts) { const row = html("div", list); html("dt", row, name); html("dd", row); }
      if (part.state !== "planned") links(html("p", map.detail, "", "links"), state, part);
    }
    map.detail.querySelectorAll("dd").forEach((each, nth) => say(each, facts[nth][1]));
    const told = `${part.partition} ${part.state}`;
    // Announces changes of state, not the figures of every second.
    if (map.told !== null && map.told !== told) map.spoken.textContent = `Partition ${part.partition} is ${part.state}.`;
    map.told = told;
  }

  function links(line, state, part) {
    const queue = encodeURIComponent(state.queue);
    for (const [text, url] of [["Placement", `/ui/rounds?queue=${queue}&partition=${part.partition}`], ["Items", `/ui/queues/${queue}/items?partition=${part.partition}`],
      ["Partitions", `/ui/queues/${queue}/partitions`]]) {
      html("a", line, text).href = url;
      line.append(" ");
    }
  }

  function factsOf(state, part) {
    const [icon] = LOOKS[part.state] || LOOKS.unavailable;
    const count = value => value === null || value === undefined ? "–" : number.format(value);
    const facts = [["State", `${icon} ${part.state}${part.degraded ? ", degraded: much slower than its peers" : ""}${part.going ? ", would be drained" : ""}`], ["Backend", part.backend]];
    if (part.parents.length) facts.push(["Replaces", part.parents.join(", ")]);
    if (part.state === "planned") return facts;
    facts.push(["Owner", part.owner || "none"], ["Ready", count(part.ready)], ["Leased", count(part.leased)], ["Scheduled", count(part.scheduled)]);
    if (part.transferring) facts.push(["In transit", count(part.transferring)]);
    if (part.drains && part.left !== null) {
      const by = drained(part.partition), to = heirs(state, part);
      facts.push(["Left", part.left > 0 && part.left === part.leased ? `${items(part.left)}, all leased: waiting` : items(part.left)], ["Drain rate", perSecond(by)], ["Time left", leftFor(part.left, by)]);
      facts.push(["Target", state.moving.drain === "natural" ? "consumers" : to.length ? `partitions ${to.join(", ")}` : "kept partitions"]);
    }
    if (part.movedIn) facts.push(["Moved in", `${count(part.movedIn)}${filled(part.partition) ? `, ${perSecond(filled(part.partition))}` : ""}`]);
    if (typeof part.commit === "number") facts.push(["Commit time", `${part.commit.toFixed(1)} ms`]);
    return facts;
  }

  // ---- total rate ----

  function pace(state) {
    const draining = state.parts.filter(part => part.drains && part.left !== null), rates = draining.map(part => drained(part.partition));
    const known = draining.length > 0 && rates.every(each => each !== null);
    const by = known ? rates.reduce((sum, each) => sum + each, 0) : null;
    const left = draining.reduce((sum, part) => sum + part.left, 0);
    for (const each of document.querySelectorAll("[data-draining=rate]")) say(each, by === null ? "– items/s" : perSecond(by).replace("/s", " items/s"));
    for (const each of document.querySelectorAll("[data-draining=time]")) say(each, `time left: ${known ? leftFor(left, by) : "–"}`);
  }

  function shown() {
    const island = document.getElementById("map-data"), box = document.getElementById("map");
    if (!island) return;
    const state = read(JSON.parse(island.textContent));
    note(state);
    if (box) {
      if (!map || map.box !== box) begin(box);
      map.state = state;
      draw();
    }
    pace(state);
  }

  // An unchanged page sends nothing, yet the rates have to fall.
  setInterval(() => { if (map && map.state && map.state.moving) { note(map.state); draw(); pace(map.state); } }, 1000);
  document.addEventListener("ui:shown", shown);
  // Puts the preselected queue into the URL, so that it can be shared.
  const chosen = document.querySelector("select#queue, input#queue");
  if (chosen && location.pathname === "/ui/map" && !new URLSearchParams(location.search).get("queue")) {
    const url = new URL(location);
    url.searchParams.set("queue", chosen.value);
    history.replaceState(null, "", url);
  }
  shown();
})();
