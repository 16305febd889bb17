"use strict";
(() => {
  const { byId } = live;
  const form = byId("form");
  const DEFAULTS = { // usual first settings of each optimizer
    sgd: { lr: "0.1", wd: "5e-4", momentum: "0.9" }, sgdw: { lr: "0.1", wd: "5e-3", momentum: "0.9" },
    adamw: { lr: "1e-3", wd: "0.1", betas: "0.9,0.999" }, adam: { lr: "1e-3", wd: "1e-4", betas: "0.9,0.999", unit_grad_sq: "10", dim: "100000" },
    lion: { lr: "1e-4", wd: "1", betas: "0.9,0.99" }, muon: { lr: "0.02", wd: "0.1", momentum: "0.95" },
  };

  const changed = (event) => {
    if (event.target.id === "optimizer") {
      for (const [name, value] of Object.entries(DEFAULTS[event.target.value])) byId(name).value = value;
      form.dispatchEvent(new Event("refilled"));
    }
    if (event.target.id === "schedule") byId("factor").value = event.target.value === "exponential" ? "0.98" : "0.2";
  };
  const shown = (view) => { byId("command").textContent = view.command; };
  const refresh = live.formPage(form, { address: "/plan/view", draw: drawPlan, wait: 80, changed, shown });
  live.fillForm(form);
  refresh();
})();
