"use strict";
(() => {
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const NARROW = 400; // pixels
  const drawn = () => document.querySelectorAll(".plot.js-plotly-plot");

  // ---- light and dark

  // The current value of a colour of the style sheet, read from an element that uses it.
  function inks() {
    const probe = document.body.appendChild(document.createElement("span"));
    const cssValue = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    const scale = (name, stops) => Array.from({ length: stops }, (_, k) => [k / (stops - 1), cssValue(`${name}-${k}`)]);
    const all = {
      text: cssValue("text"), muted: cssValue("muted"), grid: cssValue("grid"), rule: cssValue("rule"), surface: cssValue("surface"),
      sequential: scale("sequential", 4), diverging: scale("diverging", 5),
    };
    probe.remove();
    return all;
  }

  function template() {
    const ink = inks();
    const axis = {
      gridcolor: ink.grid, linecolor: ink.rule, zerolinecolor: ink.rule, tickcolor: ink.rule, zeroline: false,
      tickfont: { color: ink.muted, size: 11 }, title: { font: { color: ink.muted, size: 12 } },
    };
    const bar = { tickfont: { color: ink.muted, size: 10 }, title: { font: { color: ink.muted, size: 11 } } };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
        font: { color: ink.text, family: getComputedStyle(document.body).fontFamily, size: 12 },
        hoverlabel: { bgcolor: ink.surface, bordercolor: ink.rule, font: { color: ink.text } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: ink.muted, activecolor: ink.text },
        annotationdefaults: { bgcolor: ink.surface, opacity: 0.85, borderpad: 1, font: { color: ink.text, size: 12 } },
        coloraxis: { colorscale: ink.sequential, colorbar: bar },
        coloraxis2: { colorscale: ink.diverging, colorbar: bar },
      },
    };
  }

  const wishes = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wishes.matches);

  function label() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
  }

  function repaint() {
    label();
    const now = template();
    return Promise.all(Array.from(drawn(), (plot) => Plotly.relayout(plot, { template: now })));
  }

  function remember(theme) {
    try {
      localStorage.setItem("fedrane-theme", theme);
    } catch { /* a browser may keep nothing for files: the choice then lasts as long as the page */ }
  }

  try {
    const kept = localStorage.getItem("fedrane-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* as above */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    repaint();
  });
  wishes.addEventListener("change", repaint);

  // ---- plots

  async function draw() {
    label();
    const now = template();
    const begun = isDark();
    const touch = !matchMedia("(hover: hover)").matches; // a finger scrolls the page: it must not zoom a plot instead
    const config = {
      responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: touch ? false : "hover",
      toImageButtonOptions: { format: "svg" },
      modeBarButtonsToRemove: ["zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    };
    for (const [id, plot] of Object.entries(plots)) {
      const layout = { ...plot.layout, template: now, ...(touch ? { dragmode: false } : {}) };
      // On a phone, names beside the lines would take a third of the plot; the legend has them too.
      const wide = document.getElementById(id).clientWidth > NARROW;
      if (!wide) layout.margin = { ...layout.margin, r: layout.margin.l };
      await Plotly.newPlot(id, wide ? plot.data : plot.data.filter((trace) => trace.meta !== "name"), layout, config);
      await new Promise((next) => setTimeout(next)); // the page stays usable meanwhile
    }
    if (isDark() !== begun) await repaint();
    root.dataset.ready = "true";
  }

  // ---- which lines are shown, in all plots at once

  const hidden = new Set();
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const line = chip.dataset.line;
      if (!hidden.delete(line)) hidden.add(line);
      for (const same of document.querySelectorAll(`.chip[data-line="${line}"]`))
        same.setAttribute("aria-pressed", String(!hidden.has(line)));
      for (const plot of drawn()) {
        const traces = plot.data.flatMap((trace, k) => (trace.legendgroup === line ? [k] : []));
        if (traces.length) Plotly.restyle(plot, { visible: !hidden.has(line) }, traces);
      }
    });
  }

  // ---- the data

  // Spreadsheets take a text that begins like this for a formula, and names come from files.
  const FORMULA = /^[\s]*[=+\-@\t\r]/;

  function csv({ methods }) {
    const runs = methods.flatMap(({ name, runs }) => runs.map((run) => ({ name, ...run })));
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => key !== "round");
    const text = (words) => `"${(FORMULA.test(words) ? "'" : "") + words.replaceAll('"', '""')}"`;
    const row = (run, k) => {
      const round = run.metrics.round[k];
      const stage = round > run.rounds ? "post-training" : "training";
      return [text(run.name), run.seed, round, stage, ...keys.map((key) => run.metrics[key]?.[k] ?? "")];
    };
    const head = ["method", "seed", "round", "stage", ...keys.map(text)];
    return [head, ...runs.flatMap((run) => run.metrics.round.map((_, k) => row(run, k)))].join("\r\n") + "\r\n";
  }

  for (const button of document.querySelectorAll("[data-download]")) {
    button.addEventListener("click", () => {
      const kind = button.dataset.download;
      const data = JSON.parse(document.getElementById("data").textContent);
      const content = kind === "csv" ? csv(data) : JSON.stringify(data, null, 1);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([content], { type: kind === "csv" ? "text/csv" : "application/json" }));
      link.download = `report.${kind}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
  }

  // ---- tables

  const empty = (cell) => cell.dataset.value === "";

  function sort(table, column, direction) {
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      if (empty(x) || empty(y)) return empty(x) - empty(y); // nothing comes last, whichever way
      if (column === 0) return sign * x.dataset.value.localeCompare(y.dataset.value);
      return sign * (Number(x.dataset.value) - Number(y.dataset.value));
    };
    for (const body of table.tBodies) body.append(...Array.from(body.rows).sort(compare));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = table.tHead.rows[table.tHead.rows.length - 1].cells;
    Array.from(heads).forEach((head, column) => {
      const first = head.firstElementChild.dataset.first;
      head.firstElementChild.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const other = first === "ascending" ? "descending" : "ascending";
        const direction = now === first ? other : first;
        for (const each of heads) each.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", direction);
        sort(table, column, direction);
      });
    });
  }

  const target = document.getElementById("target");
  if (target) {
    target.addEventListener("change", () => {
      for (const body of document.getElementById("cost-table").tBodies)
        body.hidden = body.dataset.choice !== target.value;
    });
  }

  // ---- on paper: light, all settings shown, plots as wide as the paper allows

  // Plots.resize waits a moment, which a printer does not: a width that is set is drawn at once.
  function fit(plot, wide) {
    const width = wide ? plot.clientWidth : null;
    return Plotly.relayout(plot, { template: template(), width, autosize: !wide });
  }

  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme || "";
    root.dataset.theme = "light";
    root.classList.add("printing");
    for (const details of document.querySelectorAll("details")) details.open = true;
    for (const plot of drawn()) fit(plot, true);
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    root.classList.remove("printing");
    for (const plot of drawn()) fit(plot, false);
  });

  draw();
})();
