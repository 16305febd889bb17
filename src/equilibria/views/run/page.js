// Each function below draws once and returns a function that draws newer data into the same charts, for live pages.

// ---- sharpness and the edge of stability, if there was a tracker
const drawSharpness = (first) => {
  let tracked = first;
  const charts = ["sharpness-chart", "ratio-chart", "loss-chart"].map((id) => document.getElementById(id));
  const { color } = charting;
  const ends = () => [tracked.step[0], Math.max(tracked.step.at(-1), tracked.step[0] + 1)];
  const across = ends(); // changed in place: a zoom back shows the whole run so far

  const line = (kind, name, style) => ({
    x: tracked.step, y: tracked[kind], mode: tracked.step.length > 1 ? "lines" : "markers", connectgaps: false, line: style, marker: { color: style.color },
    hovertemplate: name + " %{y:.4~g}<extra></extra>", meta: { kind },
  });

  const bounds = (kinds, least, floor = 0) => {
    const values = kinds.flatMap((kind) => tracked[kind]).filter((value) => value !== null && value > floor);
    if (!values.length) return [0.1, 10];
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, 0]);
    const room = Math.max(1.15, Math.sqrt((least * low) / high));
    return [low / room, high * room];
  };

  const shaded = (shapes = []) => ({ shapes: [
    ...tracked.edge.map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1,
      fillcolor: color("gap"), line: { width: 0 }, layer: "below" })), ...shapes ] });

  const chart = (index, kinds, range, title, more) => charting.draw(charts[index], kinds,
    charting.look(charting.size(charts[index]), { across, unit: "step", range, title, more }));

  const drawAll = () => {
    const limit = { color: color("threshold"), width: 2.5, dash: "8px,5px" };
    const ink = { color: color("ink"), width: 1.8 };
    chart(0, [line("threshold", "threshold", limit), line("sharpness", "sharpness", ink)],
      bounds(["threshold", "sharpness"], 4), "sharpness", shaded());
    const one = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, line: limit };
    const [low, high] = bounds(["ratio"], 2);
    chart(1, [line("ratio", "R", ink)], [Math.min(low, 0.7), Math.max(high, 1.4)], "R", shaded([one]));
    const least = tracked.loss_floor;
    chart(2, [line("loss_predicted", "lowest loss so far plus the most that the edge adds", limit), line("loss", "loss", { color: color("predicted"), width: 1.8 })],
      bounds(["loss", "loss_predicted"], 4, least), "loss", shaded());
  };

  drawAll();
  charting.linkZoom(charts, across);
  charting.keepDrawn(charts, drawAll);
  return (next) => { tracked = next; across.splice(0, 2, ...ends()); drawAll(); };
};

// ---- angles, norms and settings of every layer
const drawLayers = (first) => {
  let report = first;
  let layers = report.layers;
  const byId = (id) => document.getElementById(id);
  const charts = ["angle-chart", "norm-chart", "schedule-chart"].map(byId);
  const { color } = charting;
  const COLOURS = 12;
  const FEW = 3; // so few that their envelopes do not hide each other

  // ---- the curves, decoded when they are first drawn

  const decoded = new Map();
  const curve = (number) => {
    if (number === null) return null;
    if (!decoded.has(number)) {
      const bytes = Uint8Array.from(atob(report.arrays[number]), (letter) => letter.charCodeAt(0));
      decoded.set(number, new Float32Array(bytes.buffer));
    }
    return decoded.get(number);
  };

  const hasLaw = () => layers.some(({ ratio, norm_ratio }) => ratio !== null || norm_ratio !== null);

  // ---- which layers to draw

  const state = { chosen: new Set(), words: [], all: report.middle === null, relative: false, opened: new Set(), worstFirst: false };
  const tones = new Map(); // a layer keeps its colour when the order changes
  const tone = (index) => {
    const { name } = layers[index];
    if (!tones.has(name)) tones.set(name, tones.size % COLOURS);
    return tones.get(name);
  };
  const knowAll = () => layers.forEach((_, index) => tone(index));
  const matches = (index) => state.words.every((word) => layers[index].name.toLowerCase().includes(word));
  const matching = () => layers.map((_, index) => index).filter(matches);

  const drawn = () => {
    const matched = matching();
    const coloured = [...new Set([...state.chosen, ...matched.slice(0, COLOURS)])].sort((a, b) => a - b);
    const rest = state.all ? matched.slice(COLOURS).filter((index) => !state.chosen.has(index)) : [];
    return { matched, coloured, rest };
  };

  const bright = (index) => state.chosen.size === 0 || state.chosen.has(index);
  const detailed = (index, coloured) => state.chosen.has(index) || (state.chosen.size === 0 && coloured.length <= FEW);
  const hue = (index) => color("c" + tone(index));
  const veil = (value) => value.replace(/^#(..)(..)(..)$/, (_, ...hex) =>
    "rgba(" + hex.slice(0, 3).map((two) => parseInt(two, 16)).join(",") + ",0.16)");

  // ---- traces; "meta" names the kind of a trace and its layer

  // A line ends where recording stopped and begins again where it went on: at a distance of more than four times those on
  // both sides of it. Sampling that only becomes rarer leaves no such hole.
  const HOLE = 4;
  const withHoles = (x, y) => {
    const gap = (i) => (i > 0 && i < x.length ? x[i] - x[i - 1] : 0);
    const holes = new Set(Array.from(x, (_, i) => i).filter((i) => gap(i) > HOLE * Math.max(gap(i - 1), gap(i + 1))));
    if (x.length < 4 || !holes.size) return { x, y };
    const spread = (values, filling) => Array.from(values).flatMap((value, i) => (holes.has(i) ? [filling(i), value] : [value]));
    return { x: spread(x, (i) => x[i - 1]), y: spread(y, () => null) };
  };

  const line = (x, y, meta, style, hover) => ({
    ...(Array.isArray(x) ? { x, y } : withHoles(x, y)), meta, mode: "lines", connectgaps: false, line: style,
    ...(hover ? { hovertemplate: hover + "<extra></extra>" } : { hoverinfo: "skip" }),
  });

  const escapeText = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;");
  const where = first.unit === "epoch" ? "epoch %{x:.4~g}" : "step %{x:,.0f}";

  const measured = (index, kind, x, text) => {
    const y = curve(layers[index][kind]);
    if (y === null) return [];
    const trace = line(curve(layers[index][x]), y, { kind: "measured", layer: index },
      { color: hue(index), width: state.chosen.has(index) ? 2.5 : 1.5 },
      "<b>" + escapeText(layers[index].name) + "</b><br>" + where + ": " + text);
    return [{ ...trace, opacity: bright(index) ? 1 : 0.2 }];
  };

  const companion = (index, kind, dash, text) => {
    const y = curve(layers[index][kind]);
    if (y === null) return [];
    const trace = line(curve(layers[index].line_x), y, { kind, layer: index }, { color: hue(index), width: 1.5, dash },
      "<b>" + escapeText(layers[index].name) + "</b><br>" + where + ": " + text);
    return [{ ...trace, opacity: bright(index) ? 0.9 : 0.15 }];
  };

  // All other layers in one grey trace: hundreds of traces would be slow.
  const others = (rest, kind, xs) => {
    const x = [], y = [], text = [];
    for (const index of rest) {
      const values = curve(layers[index][kind]);
      if (values === null) continue;
      const name = escapeText(layers[index].name);
      const broken = withHoles(curve(layers[index][xs]), values);
      broken.x.forEach((at, i) => { x.push(at); y.push(broken.y[i]); text.push(name); });
      x.push(null); y.push(null); text.push("");
    }
    const trace = line(x, y, { kind: "rest", count: rest.length }, { color: color("rest"), width: 1 },
      "<b>%{text}</b><br>" + where + ": %{y:.3~g}");
    return x.length ? [{ ...trace, text }] : [];
  };

  const middle = (kind) => {
    if (report.middle === null || state.all) return [];
    const [low, median, high] = report.middle[kind].map(curve);
    if (low === null) return [];
    const x = curve(report.middle.x[1]);
    return [
      { ...charting.area(x, high, low, color("middle")), meta: { kind: "middle" } },
      line(x, median, { kind: "median" }, { color: color("soft"), width: 1.5 }, "<b>median layer</b><br>" + where + ": %{y:.3~g}"),
    ];
  };

  const envelope = (index) => {
    const [low, high] = [curve(layers[index].low), curve(layers[index].high)];
    if (low === null || high === null) return [];
    return [{ ...charting.area(curve(layers[index].x), high, low, veil(hue(index))), meta: { kind: "envelope", layer: index } }];
  };

  // Layers with the same lr and wd have the same equilibrium: one line for all of them.
  const once = (indexes, kind, trace) => {
    const seen = new Map();
    for (const index of indexes) {
      const number = layers[index][kind];
      if (number !== null && !seen.has(number)) seen.set(number, index);
    }
    return [...seen.values()].map(trace);
  };

  const equilibria = (indexes) => once(indexes, "equilibrium", (index) => line(curve(layers[index].line_x),
    curve(layers[index].equilibrium), { kind: "equilibrium" }, { color: color("equilibrium-band"), width: 7 },
    "<b>equilibrium</b><br>" + where + ": %{y:.3~g} rad"));

  // ---- the charts

  const extent = (traces, least, margin = 1.12) => {
    let low = Infinity, high = 0;
    for (const trace of traces) {
      for (const value of trace.y) if (value > 0 && value < Infinity) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (high === 0) return [0.1, 10];
    const room = Math.max(margin, Math.sqrt((least * low) / high));
    return [low / room, high * room];
  };

  const layout = (chart, range, title, more) => charting.look(charting.size(chart), {
    across: report.range, unit: report.unit, range, title, more: { hovermode: "closest", hoverdistance: 30, ...more },
  });

  const aroundOne = () => ({ shapes: [
    { type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 0.95, y1: 1.05, fillcolor: color("band"), line: { width: 0 }, layer: "below" },
    { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: color("equilibrium-band"), width: 4 }, layer: "below" },
  ] });

  const ratios = (chart, kind, title, reference, { coloured, rest }) => {
    const traces = [
      ...middle(kind), ...others(rest, kind, "x"), ...coloured.slice().reverse().flatMap((index) => measured(index, kind, "x", "%{y:.3~g} × " + reference)),
    ];
    const [low, high] = extent(traces, 1.6);
    return [traces, layout(chart, [Math.min(low, 0.8), Math.max(high, 1.25)], title, aroundOne())];
  };

  const angleChart = (chart, shown) => {
    if (state.relative) return ratios(chart, "ratio", "angle ÷ predicted", "predicted", shown);
    const { coloured, rest } = shown;
    const back = coloured.slice().reverse();
    const traces = [
      ...middle("angle"), ...equilibria([...coloured, ...rest]), ...others(rest, "angle", "x"),
      ...back.filter((index) => detailed(index, coloured)).flatMap(envelope),
      ...back.flatMap((index) => measured(index, "angle", "x", "turns %{y:.3~g} rad per step")),
      ...back.flatMap((index) => companion(index, "predicted", "6px,4px", "predicted %{y:.3~g} rad")),
    ];
    return [traces, layout(chart, extent(traces, 4), "angle per step, rad")];
  };

  const normChart = (chart, shown) => {
    if (state.relative) return ratios(chart, "norm_ratio", "norm ÷ equilibrium", "equilibrium", shown);
    const { coloured, rest } = shown;
    const back = coloured.slice().reverse();
    const traces = [
      ...middle("norm_rms"), ...others(rest, "norm", "line_x"),
      ...back.flatMap((index) => companion(index, "norm_equilibrium", "2px,3px", "equilibrium ‖w‖ = %{y:.3~g}")),
      ...back.filter((index) => detailed(index, coloured))
        .flatMap((index) => companion(index, "norm_predicted", "6px,4px", "predicted ‖w‖ = %{y:.3~g}")),
      ...back.flatMap((index) => measured(index, "norm", "line_x", "‖w‖ = %{y:.3~g}")),
    ];
    return [traces, layout(chart, extent(traces, 4), "norm of the weights")];
  };

  const scheduleChart = (chart, { coloured, rest }) => {
    const setting = (kind, name, style) => once([...coloured, ...rest], kind, (index) =>
      line(curve(layers[index].line_x), curve(layers[index][kind]), { kind }, style, "<b>" + name + "</b><br>" + where + ": %{y:.3~g}"));
    const traces = [
      ...setting("wd", "weight decay", { color: color("wd"), width: 2, dash: "8px,5px" }),
      ...setting("lr", "learning rate", { color: color("lr"), width: 2 }),
    ];
    return [traces, layout(chart, extent(traces, 4, 1.5), "lr, wd")];
  };

  const drawMetrics = (across) => {
    byId("metrics").hidden = report.metrics.length === 0;
    panels(report.metrics.map(({ name, note, log, x, y }) => ({ name, note, log, lines: y === null ? [] : [
      { x: curve(x), y: curve(y), color: color("ink"), text: "<b>" + escapeText(name) + "</b><br>" + where + ": %{y:.4~g}" }] })),
    report.unit, across);
  };

  const drawAll = () => {
    const shown = drawn();
    const stretch = charts[0].layout ? charts[0].layout.xaxis.range : whole; // a zoom survives
    [angleChart, normChart, scheduleChart].forEach((chart, index) => {
      const [traces, look] = chart(charts[index], shown);
      look.xaxis.range = [...stretch];
      charting.draw(charts[index], traces, look);
    });
    drawMetrics(stretch);
    showKeys(shown);
  };

  // ---- the table, the chips and the controls

  const whole = [...report.range]; // changed in place: a zoom back shows the whole run so far
  const panels = charting.metricPanels(byId("metric-charts"), charts, whole); // which adds its charts to the others
  const rows = () => document.querySelectorAll("tr[data-layer]");

  const chip = (index) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    button.type = "button";
    button.className = "c" + tone(index);
    button.dataset.layer = index;
    button.setAttribute("aria-pressed", state.chosen.has(index));
    button.append(swatch, layers[index].name);
    item.append(button);
    return item;
  };

  const showKeys = ({ matched, coloured, rest }) => {
    const focused = document.activeElement && document.activeElement.closest("#chips button");
    byId("chips").replaceChildren(...coloured.map(chip));
    if (focused) {
      const again = byId("chips").querySelector('[data-layer="' + focused.dataset.layer + '"]');
      if (again) again.focus();
    }
    const inColour = new Set(coloured);
    arrange();
    for (const row of rows()) {
      const index = Number(row.dataset.layer);
      row.hidden = !matches(index) || (isFolded(row) && !state.chosen.has(index));
      row.classList.toggle("chosen", state.chosen.has(index));
      row.classList.toggle("c" + tone(index), inColour.has(index));
      row.querySelector("button").setAttribute("aria-pressed", state.chosen.has(index));
    }
    const detail = !state.relative && coloured.some((index) => detailed(index, coloured));
    const show = (kind, on) => document.querySelectorAll(".if-" + kind).forEach((item) => { item.hidden = !on; });
    show("envelope", detail);
    show("values", !state.relative && hasLaw());
    show("ratio", state.relative);
    show("rest", rest.length > 0);
    show("middle", report.middle !== null && !state.all);
    document.querySelector(".switch").hidden = !hasLaw(); // without predictions there is nothing to divide by
    byId("absolute").setAttribute("aria-pressed", !state.relative);
    byId("relative").setAttribute("aria-pressed", state.relative);
    byId("everything").setAttribute("aria-pressed", state.all);
    byId("clear").hidden = state.chosen.size === 0;
    byId("count").textContent = (state.words.length ? matched.length + " of " : "") + layers.length +
      (layers.length === 1 ? " layer" : " layers") + (state.chosen.size ? ", " + state.chosen.size + " chosen" : "");
  };

  // ---- rows that stand for the layers of one kind

  const isFolded = ({ dataset }) => "kind" in dataset && !state.worstFirst && !state.words.length && !state.opened.has(dataset.kind);

  // Model order, or the furthest off first, without the rows of kinds.
  const arrange = () => {
    const body = document.querySelector(".layers tbody");
    if (!body) return;
    const place = ({ dataset }) => Number(state.worstFirst ? dataset.rank ?? -1 : dataset.place);
    const wanted = [...body.rows].sort((a, b) => place(a) - place(b));
    if (wanted.some((row, index) => row !== body.rows[index])) body.append(...wanted);
    const matched = new Set([...rows()].filter((row) => matches(Number(row.dataset.layer))).map((row) => row.dataset.kind));
    for (const row of body.querySelectorAll("tr.kind")) {
      row.hidden = state.worstFirst || !matched.has(row.dataset.kind);
      row.querySelector("button").setAttribute("aria-expanded", !isFolded(row));
    }
    body.parentElement.classList.toggle("worst-first", state.worstFirst);
    const order = byId("order");
    if (order) { order.hidden = false; order.setAttribute("aria-pressed", state.worstFirst); }
  };

  const unfold = (kind) => {
    if (!state.opened.delete(kind)) state.opened.add(kind);
    drawAll();
  };

  const toggle = (index) => {
    if (!state.chosen.delete(index)) state.chosen.add(index);
    drawAll();
  };

  const wire = () => {
    document.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-layer]");
      if (row) toggle(Number(row.dataset.layer));
      const kind = event.target.closest("tr.kind");
      if (kind) unfold(kind.dataset.kind);
      if (event.target.closest("#order")) { state.worstFirst = !state.worstFirst; drawAll(); }
    });
    byId("chips").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) toggle(Number(button.dataset.layer));
    });
    let waiting = null;
    byId("search").addEventListener("input", (event) => {
      clearTimeout(waiting); // typing stays smooth with hundreds of layers
      waiting = setTimeout(() => {
        state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
        drawAll();
      }, 120);
    });
    byId("absolute").addEventListener("click", () => { state.relative = false; drawAll(); });
    byId("relative").addEventListener("click", () => { state.relative = true; drawAll(); });
    byId("everything").addEventListener("click", () => { state.all = !state.all; drawAll(); });
    byId("clear").addEventListener("click", () => { state.chosen.clear(); drawAll(); byId("search").focus(); });
  };

  byId("controls").hidden = false;
  byId("charts").hidden = false;
  byId("everything").hidden = report.middle === null;
  document.querySelector(".search").hidden = layers.length === 1;
  knowAll();
  wire();
  drawAll();
  charting.linkZoom(charts, whole, charts.slice(0, 3)); // the panels are linked already
  charting.keepDrawn(charts, drawAll);

  return (next) => {
    const names = new Set([...state.chosen].map((index) => layers[index].name));
    const zoomed = charts[0].layout.xaxis.range.some((end, at) => end !== whole[at]);
    state.all = next.middle === null || (report.middle !== null && state.all);
    report = next;
    layers = next.layers;
    decoded.clear();
    state.chosen = new Set(layers.flatMap((layer, index) => (names.has(layer.name) ? [index] : [])));
    whole.splice(0, 2, ...next.range);
    if (!zoomed) charts[0].layout.xaxis.range = [...whole];
    byId("everything").hidden = next.middle === null;
    document.querySelector(".search").hidden = layers.length === 1;
    knowAll();
    drawAll();
  };
};

// Draws the data; the function it returns takes newer data, in which there may be more.
const drawReport = (data) => {
  let sharpness = null, layers = null;
  const update = (next) => {
    if (next.sharpness) { if (sharpness) sharpness(next.sharpness); else sharpness = drawSharpness(next.sharpness); }
    if (next.layers.length) { if (layers) layers(next); else layers = drawLayers(next); }
  };
  update(data);
  return update;
};

charting.whenComplete(drawReport);
