// The charts: a queue's history per minute with its current values; and, while there are few minutes or none, one point a second.
"use strict";
(() => {
  const EVERY = 60;
  const island = id => { const found = document.getElementById(id); return found && JSON.parse(found.textContent); };
  // The overview has no history: it shows what comes while it is open.
  let begun = island("history");
  if (!begun && !island("history-tail")) return;
  // From so many minutes on, they say more than the seconds.
  const MANY = 5, SECONDS = 300;
  const points = [];

  // Lines differ in their dashes as well as in colour.
  const LINES = {
    "chart-flow": {axis: "items per minute", lines: [
      ["produced", "produced", "--water", []], ["completed", "completed", "--good", [10, 4]], ["failed", "retried, expired or dead", "--bad", [2, 3]]]},
    "chart-depth": {axis: "items", lines: [
      ["ready", "ready", "--water", []], ["leased", "leased", "--warn", [10, 4]], ["scheduled", "scheduled", "--soft", [2, 3]]]},
  };
  const minutes = new Map();
  let now = null;
  let charts = [];

  // Resolves a CSS variable of the colour scheme for the canvas.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = name => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };

  const short = new Intl.NumberFormat(undefined, {notation: "compact", maximumFractionDigits: 1});
  const exact = new Intl.NumberFormat(undefined, {maximumFractionDigits: 1});
  const clock = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit"});
  const precise = new Intl.DateTimeFormat(undefined, {hour: "2-digit", minute: "2-digit", second: "2-digit"});
  const at = seconds => (isLive() ? precise : clock).format(new Date(seconds * 1000));

  function take(told) {
    if (told.now) now = told.now;
    if (!told.columns) return;
    const names = Object.keys(told.columns);
    told.columns[names[0]].forEach((_, place) => {
      const minute = told.from + EVERY * place;
      const found = {};
      for (const name of names) found[name] = told.columns[name][place];
      minutes.set(minute, found);
    });
    const last = Math.max(...minutes.keys());
    for (const minute of minutes.keys()) if (minute <= last - EVERY * begun.minutes) minutes.delete(minute);
  }

  // A page that was suspended for longer than the tail reloads the missing minutes.
  async function catchUp() {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.getElementById("history");
    if (found) { begun = JSON.parse(found.textContent); take(begun); update(); }
  }

  const isLive = () => !begun || [...minutes.values()].filter(each => each.ready !== null && each.ready !== undefined).length < MANY;

  function tick() {
    if (!now || !isLive()) return;
    // A chart that has just begun fills from the right, and is a minute wide.
    if (!points.length) points.push({second: Math.round(Date.now() / 1000) - 60});
    points.push({second: Math.round(Date.now() / 1000), ...now});
    if (points.length > SECONDS) points.shift();
    update();
  }

  function columns(lines) {
    if (isLive()) return [points.map(each => each.second), ...lines.map(([name]) => points.map(each => each[name] ?? null))];
    const last = Math.max(...minutes.keys());
    const times = [], rows = lines.map(() => []);
    for (let minute = last - EVERY * (begun.minutes - 1); minute <= last; minute += EVERY) {
      const found = minutes.get(minute) || {};
      times.push(minute + EVERY);
      lines.forEach(([name], place) => rows[place].push(found[name] ?? null));
    }
    if (now) {
      times.push(last + 2 * EVERY);
      lines.forEach(([name], place) => rows[place].push(now[name] ?? null));
    }
    return [times, ...rows];
  }

  // Isolated values and the current value are drawn as points.
  const alone = (chart, line) => {
    const row = chart.data[line], found = [];
    for (let place = 0; place < row.length; place++)
      if (row[place] !== null && ((row[place - 1] ?? null) === null && (row[place + 1] ?? null) === null || (now && place === row.length - 1))) found.push(place);
    return found;
  };

  function options(place, {axis, lines}) {
    const axes = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1}, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif"};
    return {
      width: place.clientWidth - 16, height: 240,
      cursor: {drag: {x: false, y: false}, sync: {key: "queue"}},
      // Without a pointer the legend shows the current values.
      hooks: {setCursor: [chart => { if (chart.cursor.idx === null) latest(chart); }]},
      legend: {markers: {dash: (_, line) => ["", "solid", "dashed", "dotted"][line]}},
      scales: {y: {range: (_, low, high) => [0, Math.max(high || 0, 4) * 1.08]}},
      axes: [
        {...axes, values: (_, splits) => splits.map(at), space: isLive() ? 110 : 70},
        {...axes, label: axis, size: 58, labelSize: 20, values: (_, splits) => splits.map(each => short.format(each)), incrs: [1, 2, 5].flatMap(each => [...Array(13).keys()].map(power => each * 10 ** power)).sort((one, other) => one - other)},
      ],
      series: [
        {label: "at", value: (chart, value, _, place) => value === null ? "–" : now && place === chart.data[0].length - 1 ? "now" : at(value)},
        ...lines.map(([, label, name, dash]) => ({
          label, stroke: colour(name), width: 2, dash,
          points: {show: true, filter: alone, size: 6, fill: colour(name)},
          value: (_, value) => value === null ? "–" : exact.format(value),
        })),
      ],
    };
  }

  const latest = chart => chart.setLegend({idx: chart.data[0].length - 1}, false);

  function draw() {
    for (const each of charts) each.destroy();
    charts = [];
    for (const [id, chart] of Object.entries(LINES)) {
      const place = document.getElementById(id);
      if (place) charts.push(new uPlot(options(place, chart), columns(chart.lines), place));
    }
    charts.forEach(latest);
  }

  function update() {
    if (!charts.length || charts.some(each => !each.root.isConnected)) { draw(); return; }
    Object.values(LINES).forEach(({lines}, place) => {
      const data = columns(lines);
      const chart = charts[place];
      if (JSON.stringify(data) === JSON.stringify(chart.data)) return;
      chart.setData(data);
      if (chart.cursor.idx === null) latest(chart);
    });
  }

  function shown() {
    const tail = island("history-tail");
    if (!tail) return;
    const missed = begun && tail.from > Math.max(...minutes.keys()) + EVERY;
    take(tail);
    if (!points.length) tick();
    update();
    if (missed) catchUp().catch(() => {});
  }

  if (begun) take(begun);
  setInterval(tick, 1000);
  document.addEventListener("ui:shown", shown);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => {
    for (const each of charts) {
      const width = each.root.parentElement?.clientWidth - 16;
      if (width > 0 && width !== each.width) each.setSize({width, height: 240});
    }
  }).observe(document.getElementById("main"));
  shown();
})();
