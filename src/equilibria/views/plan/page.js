// Draws the charts and returns a function that draws newer data into them, for the live page.
const drawPlan = (first) => {
  let typed = first;
  let plan = typed;
  const across = [0, typed.end]; // changed in place: a zoom ends at the whole run, which may have grown
  const charts = ["angle-chart", "norm-chart", "schedule-chart"].map((id) => document.getElementById(id));
  const { color } = charting;

  const line = (y, name, style, unit, extra) => ({
    x: plan.x, y, name, mode: "lines", line: { simplify: false, ...style }, hovertemplate: "%{y:.3~g}" + unit + (extra || ""),
    hoverinfo: "x+y+name",
  });

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

  const layout = (size, range, title, more) => charting.look(size, { across: [0, plan.end], unit: plan.unit, range, title,
    more: { shapes: phaseShapes(), annotations: phaseLabels(size[0]), ...more } });

  const angleChart = (size) => {
    const predicted = line(plan.angle, "predicted", { color: color("predicted"), width: 4 }, " rad",
      plan.band ? " = %{customdata[0]} of equilibrium" : "");
    predicted.customdata = plan.ratio.map((ratio) => [ratio === null ? "?" : Math.round(100 * ratio) + " %"]);
    const alone = line(plan.by_lr, "lr alone", { color: color("naive"), width: 2, dash: "dot" }, " rad");
    const before = plan === typed ? [] : [{ ...line(typed.angle, typed.name, { color: color("predicted"), width: 1.5 }, " rad"),
      x: typed.x, opacity: 0.55 }];
    return [plan.band ? [
      charting.area(plan.x, plan.equilibrium, plan.angle, color("gap")),
      alone,
      ...before,
      predicted,
      line(plan.equilibrium, "equilibrium", { color: color("equilibrium"), width: 2, dash: "dash" }, " rad"),
    ] : [alone, ...before, predicted], layout(size, plan.angle_range, "angle per step, rad")];
  };

  const normChart = (size) => {
    if (!plan.band) {
      return [[line(plan.norm, "norm", { color: color("predicted"), width: 3 }, "")],
        layout(size, plan.norm_range, "norm")];
    }
    const band = { type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: plan.band[0], y1: plan.band[1],
      fillcolor: color("band"), line: { width: 0 }, layer: "below" };
    const one = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: 1, y1: 1, layer: "above",
      line: { color: color("equilibrium"), width: 2, dash: "dash" } };
    return [
      [line(plan.norm_ratio, "norm", { color: color("predicted"), width: 3 }, " × equilibrium norm")],
      layout(size, plan.norm_range, "norm ÷ equilibrium", { shapes: [...phaseShapes(), band, one] }),
    ];
  };

  const scheduleChart = (size) => [[
    line(plan.lr, "lr", { color: color("lr"), width: 2 }, ""),
    line(plan.wd, "wd", { color: color("wd"), width: 2, dash: "dash" }, ""),
  ], layout(size, plan.schedule_range, "lr, wd")];

  const drawAll = () => {
    plan = [typed, ...typed.alternatives][charting.chosen()] || typed;
    [angleChart, normChart, scheduleChart].forEach((chart, index) => {
      charting.draw(charts[index], ...chart(charting.size(charts[index])));
    });
  };

  drawAll();
  charting.onChoice(drawAll);
  charting.linkZoom(charts, across);
  charting.keepDrawn(charts, drawAll);
  return (next) => { typed = next; across[1] = next.end; drawAll(); };
};

charting.whenComplete(drawPlan);
