"use strict";
// Shared by the pages of the server: fetch data, listen to events, and change only the parts of a page that differ.
const live = (() => {
  const byId = (id) => document.getElementById(id);

  // A screen reader reads the status aloud, so it is set only when it changes.
  const setStatus = (words, kind = "") => {
    const state = byId("state");
    if (state.textContent === words) return;
    state.className = kind ? "state-" + kind : "";
    const dot = document.createElement("span");
    dot.className = "live-dot";
    state.replaceChildren(...(kind === "training" ? [dot] : []), words);
  };

  const get = async (address) => {
    const answer = await fetch(address, { headers: { accept: "application/json" } });
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error || "the server answered " + answer.status);
    return data;
  };

  // Runs one request at a time, and once more if there were calls meanwhile.
  const oneAtATime = (work) => {
    let busy = false, again = false;
    const run = async () => {
      if (busy) { again = true; return; }
      busy = true;
      try { await work(); } finally {
        busy = false;
        if (again) { again = false; run(); }
      }
    };
    return run;
  };

  const debounce = (work, milliseconds) => {
    let waiting = null;
    return () => { clearTimeout(waiting); waiting = setTimeout(work, milliseconds); };
  };

  // A stream of events; the browser reconnects by itself.
  const listen = (address, kind, act) => {
    const source = new EventSource(address);
    source.addEventListener(kind, (event) => act(JSON.parse(event.data)));
    source.addEventListener("error", () => setStatus("No answer from the server; reconnecting", "interrupted"));
    window.addEventListener("pagehide", () => source.close());
  };

  // A browser takes seconds to compile plotly the first time, so the text is painted before it is loaded.
  let loading = null;
  const loadCharts = () => {
    loading = loading || new Promise((done, fail) => requestAnimationFrame(() => setTimeout(() => {
      const script = document.createElement("script");
      script.src = document.getElementById("chart-library").href;
      script.addEventListener("load", done);
      script.addEventListener("error", () => fail(new Error("could not load the charts; load the page again")));
      document.head.append(script);
    })));
    return loading;
  };

  const showProblem = (words) => {
    const place = byId("problem");
    if (!place) return;
    place.hidden = !words;
    if (place.textContent !== words) place.textContent = words;
  };

  const key = (node) => node.id || node.getAttribute("aria-labelledby") || node.tagName + "." + node.className;

  // Make the children of an element equal to those of another, and keep equal nodes: charts, and the one with the focus.
  const morph = (now, next) => {
    const old = new Map();
    for (const node of now.children) old.set(key(node), [...(old.get(key(node)) || []), node]);
    const wanted = [...next.children].map((node) => merged((old.get(key(node)) || []).shift(), node));
    for (const node of [...now.children]) if (!wanted.includes(node)) node.remove();
    wanted.forEach((node, place) => {
      if (now.children[place] !== node) now.insertBefore(node, now.children[place] || null);
    });
  };

  const KEPT = ".chart, [data-kept]";
  const merged = (old, node) => {
    if (!old) return node;
    if (node.matches("[data-kept]")) return old;
    if (node.matches(".chart")) { old.setAttribute("aria-label", node.getAttribute("aria-label")); return old; }
    if (node.querySelector(KEPT)) { morph(old, node); return old; }
    if (old.isEqualNode(node)) return old;
    for (const [place, details] of node.querySelectorAll("details").entries()) {
      details.open = Boolean((old.querySelectorAll("details")[place] || {}).open);
    }
    return node;
  };

  // Replace the inside of the page; selection, scroll position and focus stay.
  const showPage = (inside) => {
    const page = byId("page"), parsed = document.createElement("template");
    parsed.innerHTML = inside;
    const chosen = document.querySelector("#page input[name=choice]:checked");
    const layer = document.querySelector("#page #layer");
    const picked = layer && layer.selectedOptions[0] ? layer.selectedOptions[0].textContent : null;
    const scrolled = [...page.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    const focus = document.activeElement && page.contains(document.activeElement) ? place(document.activeElement) : null;
    morph(page, parsed.content);
    if (chosen) { const again = byId(chosen.id); if (again) again.checked = true; }
    if (picked !== null) for (const option of byId("layer").options) if (option.textContent === picked) option.selected = true;
    [...page.querySelectorAll(".scroll")].forEach((part, index) => { part.scrollLeft = scrolled[index] || 0; });
    if (focus && !page.contains(document.activeElement)) { const again = focus(); if (again) again.focus({ preventScroll: true }); }
  };

  // A function that finds the focused node again among new nodes.
  const place = (node) => {
    if (node.id) return () => byId(node.id);
    const alike = node.tagName.toLowerCase(), words = node.textContent;
    return () => [...document.querySelectorAll("#page " + alike)].find((other) => other.textContent === words);
  };

  const count = (number) => number.toLocaleString("en");
  const ago = (seconds) => {
    const passed = Math.max(0, Date.now() / 1000 - seconds);
    const units = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
    const [size, name] = units.find(([least]) => passed >= least) || units[3];
    const amount = Math.floor(passed / size);
    return amount < 1 ? "just now" : amount + " " + name + (amount === 1 ? "" : "s") + " ago";
  };
  const stateKind = (state) => state.split(" ")[0];

  // ---- forms: sliders linked to their fields, fields that depend on another choice, and the form in the address

  const linkSliders = (form) => form.querySelectorAll("[data-slides]").forEach((slider) => {
    const field = byId(slider.dataset.slides), log = "log" in slider.dataset;
    const follow = () => {
      const value = Number(field.value);
      if (field.value.trim() !== "" && Number.isFinite(value) && (!log || value > 0)) slider.value = log ? Math.log10(value) : value;
      else if (field.value.trim() === "") slider.value = slider.min;
      slider.setAttribute("aria-valuetext", field.value || field.placeholder);
    };
    slider.addEventListener("input", () => {
      const value = Number(slider.value);
      field.value = log ? String(Number((10 ** value).toPrecision(2))) : String(value);
      if (field.placeholder && value === Number(slider.min)) field.value = "";
      slider.setAttribute("aria-valuetext", field.value || field.placeholder);
    });
    field.addEventListener("input", follow);
    form.addEventListener("refilled", follow);
    follow();
  });

  const hideUnneeded = (form) => form.querySelectorAll("[data-optimizer], [data-schedule]").forEach((field) => {
    const fits = (name) => !(name in field.dataset) || field.dataset[name].split(" ").includes(byId(name).value);
    field.hidden = !(fits("optimizer") && fits("schedule"));
  });

  const formQuery = (form) => {
    const query = new URLSearchParams();
    for (const field of form.querySelectorAll("[name]")) {
      if (field.closest("[hidden]") || (field.type === "checkbox" && !field.checked)) continue;
      if (field.value.trim() !== "") query.set(field.name, field.value.trim());
    }
    return query;
  };

  const fillForm = (form) => {
    for (const [name, value] of new URLSearchParams(location.search)) {
      const field = form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value === "1"; else field.value = value;
    }
    form.dispatchEvent(new Event("refilled"));
    hideUnneeded(form);
  };

  // A form whose page the server computes: asks again after every change, and keeps the query in the address. Returns the
  // function that asks. `busy` is the status while it waits, from the query; none without it.
  const formPage = (form, { address, draw, wait, busy, changed, shown }) => {
    let update = null;
    const refresh = oneAtATime(async () => {
      const query = formQuery(form);
      if (busy) setStatus(busy(query));
      try {
        const view = await get(address + "?" + query);
        showProblem("");
        showPage(view.inside);
        await loadCharts();
        if (update) update(view.data); else update = draw(view.data);
        if (shown) shown(view);
        byId("page").classList.remove("stale");
        setStatus("Up to date");
        history.replaceState(null, "", "?" + query);
      } catch (error) {
        showProblem(error.message);
        setStatus("Not computed");
        byId("page").classList.add("stale");
      }
      document.documentElement.dataset.query = query;
    });
    const soon = debounce(refresh, wait);
    form.addEventListener("input", (event) => {
      if (changed) changed(event);
      hideUnneeded(form);
      soon();
    });
    form.addEventListener("submit", (event) => { event.preventDefault(); refresh(); });
    linkSliders(form);
    hideUnneeded(form);
    return refresh;
  };

  return { ago, byId, count, fillForm, formPage, get, listen, loadCharts, oneAtATime, setStatus, showPage, showProblem, stateKind };
})();
