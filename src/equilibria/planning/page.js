"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("plan-data").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(hover: none), (pointer: coarse)").matches;
  const charts = ["angle-chart", "norm-chart", "schedule-chart"].map((id) => document.getElementById(id));
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // The densest of a few familiar sets of marks that leaves room between them.
  const axisTicks = (low, high, most) => {
    if (high / low < 3.5) return evenTicks(low, high);
    const sets = [[1, 2, 5], [1, 3], [1]].map((digits) => {
      const values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        for (const digit of digits) values.push(Number(digit + "e" + power));
      }
      return values.filter((value) => value >= low && value <= high);
    });
    return sets.find((values) => values.length <= most) || sets[2];
  };

  const evenTicks = (low, high) => {
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((digit) => digit * power >= rough) * power;
    const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
    return Array.from({ length: count }, (_, i) => Number(((Math.ceil(low / step) + i) * step).toPrecision(6)));
  };

  const tickText = (value) => (value >= 1e-4 && value < 1e5 ? String(value) : value.toExponential().replace("e+", "e"));

  const line = (y, name, style, unit, extra) => ({
    x: plan.x, y, name, mode: "lines", line: { simplify: false, ...style }, hovertemplate: "%{y:.3~g}" + unit + (extra || ""),
    hoverinfo: "x+y+name",
  });

  // One closed outline per stretch without holes: plotly's own fill between two lines joins across holes.
  const gap = (upper, lower) => {
    const x = [], y = [];
    const close = (from, to) => {
      for (let i = from; i < to; i++) { x.push(plan.x[i]); y.push(upper[i]); }
      for (let i = to - 1; i >= from; i--) { x.push(plan.x[i]); y.push(lower[i]); }
      x.push(null); y.push(null);
    };
    let from = null;
    for (let i = 0; i <= plan.x.length; i++) {
      const whole = i < plan.x.length && upper[i] !== null && lower[i] !== null;
      if (whole && from === null) from = i;
      if (!whole && from !== null) { close(from, i); from = null; }
    }
    return { x, y, mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: color("gap"), hoverinfo: "skip" };
  };

  const phaseShapes = () => plan.phases.flatMap((phase, index) => [
    ...(index % 2 ? [{ type: "rect", xref: "x", yref: "paper", x0: phase.from, x1: phase.to, y0: 0, y1: 1,
      fillcolor: color("shade"), line: { width: 0 }, layer: "below" }] : []),
    ...(index ? [{ type: "line", xref: "x", yref: "paper", x0: phase.from, x1: phase.from, y0: 0, y1: 1,
      line: { color: color("line"), width: 1 }, layer: "below" }] : []),
  ]);

  const phaseLabels = (width) => plan.phases.flatMap((phase, index) => {
    const room = ((phase.to - phase.from) / plan.end) * (width - 90);
    const text = (room > 70 ? "phase " : "") + phase.number + (phase.mark && room > 30 ? " " + phase.mark : "");
    return room < 14 ? [] : [{ text, xref: "x", yref: "paper", x: (phase.from + phase.to) / 2, y: 1, yanchor: "bottom",
      showarrow: false, font: { size: 12, color: phase.mark ? color("warning") : color("soft") } }];
  });

  const layout = ([width, height], range, title, more) => {
    const ticks = axisTicks(range[0], range[1], height / 38);
    const narrow = width < 500;
    return {
      width, height, autosize: false, margin: { l: narrow ? 54 : 76, r: 14, t: 22, b: 42 }, showlegend: false, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: touch ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("soft") },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"),
        font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 13 } },
      xaxis: { range: [0, plan.end], title: { text: plan.unit, standoff: 6 }, showgrid: false, zeroline: false,
        linecolor: color("line"), showline: true, ticks: "outside", tickcolor: color("line"), nticks: narrow ? 5 : 10,
        unifiedhovertitle: { text: plan.unit + (plan.unit === "epoch" ? " %{x:.4~g}" : " %{x:,d}") },
        fixedrange: touch },
      yaxis: { type: "log", range: range.map(Math.log10), title: { text: narrow ? "" : title, standoff: 10 }, tickvals: ticks,
        ticktext: ticks.map(tickText), gridcolor: color("line"), griddash: "dot", zeroline: false, fixedrange: true },
      modebar: { bgcolor: color("paper"), color: color("naive"), activecolor: color("ink") },
      shapes: phaseShapes(), annotations: phaseLabels(width), ...more,
    };
  };

  const angleChart = (size) => {
    const predicted = line(plan.angle, "predicted", { color: color("predicted"), width: 4 }, " rad",
      " = %{customdata[0]} of equilibrium");
    predicted.customdata = plan.ratio.map((ratio) => [ratio === null ? "?" : Math.round(100 * ratio) + " %"]);
    return [[
      gap(plan.equilibrium, plan.angle),
      line(plan.by_lr, "lr alone", { color: color("naive"), width: 2, dash: "dot" }, " rad"),
      predicted,
      line(plan.equilibrium, "equilibrium", { color: color("goal"), width: 2, dash: "dash" }, " rad"),
    ], layout(size, plan.angle_range, "angle per step, rad")];
  };

  const normChart = (size) => {
    const band = { type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: plan.band[0], y1: plan.band[1],
      fillcolor: color("band"), line: { width: 0 }, layer: "below" };
    const one = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, layer: "above",
      line: { color: color("goal"), width: 2, dash: "dash" } };
    return [
      [line(plan.norm_ratio, "norm", { color: color("predicted"), width: 3 }, " × equilibrium norm")],
      layout(size, plan.norm_range, "norm ÷ equilibrium", { shapes: [...phaseShapes(), band, one] }),
    ];
  };

  const scheduleChart = (size) => [[
    line(plan.lr, "lr", { color: color("lr"), width: 2 }, ""),
    line(plan.wd, "wd", { color: color("wd"), width: 2, dash: "dash" }, ""),
  ], layout(size, plan.schedule_range, "lr, wd")];

  const draw = () => [angleChart, normChart, scheduleChart].forEach((chart, index) => {
    const [traces, look] = chart([charts[index].clientWidth, charts[index].clientHeight]);
    Plotly.react(charts[index], traces, look, {
      displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], displayModeBar: touch ? false : "hover",
    });
  });

  // Zoom in one chart shows the same stretch in the others.
  const linkZoom = () => charts.forEach((chart) => chart.on("plotly_relayout", (change) => {
    const reset = change["xaxis.autorange"];
    if (!reset && !("xaxis.range[0]" in change)) return;
    const range = reset ? [0, plan.end] : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    for (const other of charts) {
      const now = other.layout.xaxis.range;
      if (now[0] !== range[0] || now[1] !== range[1]) Plotly.relayout(other, { "xaxis.range": range });
    }
  }));

  const print = (on) => {
    root.classList.toggle("printing", on);
    for (const chart of charts) chart.style.width = on ? "660px" : "";
    draw();
  };

  draw();
  linkZoom();
  dark.addEventListener("change", draw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    // Phones fire "resize" when the address bar hides; only a new width changes the charts.
    if (window.innerWidth !== width) { width = window.innerWidth; draw(); }
  });
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
})();
