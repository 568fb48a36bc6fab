"use strict";
// Draws the page's data with uPlot: curves of runs over steps, tokens or time, and the memory of ranks.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const choice = { x: "step", smoothing: 0 };
  const MANY = 8; // maximum rows of a legend; with more lines, it shows only the highest and the lowest

  const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
  const stroke = number => colour(`--c${number % 8}`);
  const dashes = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

  const formats = {
    number(value) {
      const size = Math.abs(value);
      if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
      return value.toLocaleString("en", { maximumSignificantDigits: 5 });
    },
    bytes(value) {
      for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
        if (Math.abs(value) >= unit) return `${(value / unit).toLocaleString("en", { maximumSignificantDigits: 4 })} ${name}`;
      return `${value} B`;
    },
    share: value => `${(value * 100).toLocaleString("en", { maximumSignificantDigits: 3 })} %`,
    seconds(value) {
      const units = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
      const parts = [];
      let rest = Math.round(value);
      for (const [name, size] of units) {
        if (rest >= size && parts.length < 2) parts.push(`${Math.floor(rest / size)}${name}`);
        rest %= size;
      }
      return parts.join(" ") || "0s";
    },
    step: value => value.toLocaleString("en"),
    tokens: value => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }),
  };
  const told = (format, value) => (value == null ? "-" : formats[format](value));

  // Exponential moving average without the bias of its start, as in Adam.
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map(value => {
      if (value == null) return value;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  };

  // Indices of the values without a neighbour, to which no line leads, as for an attempt of one step.
  const isolated = values => {
    const known = [...values.keys()].filter(at => values[at] !== undefined);
    return known.filter((at, place) => values[at] !== null && values[known[place - 1]] == null && values[known[place + 1]] == null);
  };

  // A figure with a chart. A line has a gap at null, but not at undefined. `series`: label, values, stroke, dash, and whether it is a limit or faint.
  const draw = (place, title, xFormat, format, x, series, sync) => {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const readout = document.createElement("output");
    caption.textContent = title;
    figure.append(caption);
    place.append(figure);
    const many = series.length > MANY;
    const read = chart => {
      const at = chart.cursor.idx;
      if (at == null) { readout.textContent = ""; return; }
      const there = series.filter(one => !one.limit && one.values[at] != null).sort((a, b) => a.values[at] - b.values[at]);
      readout.textContent = there.length === 0 ? "" :
        `${told(xFormat, x[at])}: highest ${there.at(-1).label} ${told(format, there.at(-1).values[at])}, ` +
        `lowest ${there[0].label} ${told(format, there[0].values[at])}`;
    };
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const chart = new uPlot({
      width: Math.max(figure.clientWidth, 200),
      height: 220,
      padding: [null, 24, null, null],
      scales: { x: { time: false }, ...(format === "bytes" ? { y: { range: (_, low, high) => [0, high * 1.05] } } : {}) },
      cursor: { drag: { x: true, y: false }, ...(sync ? { sync: { key: sync, scales: ["x", null] } } : {}) },
      legend: { show: !many },
      hooks: many ? { setCursor: [read] } : {},
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(tick => told(xFormat, tick)), incrs: steps[xFormat], space: 70, size: 30 },
        { ...axis, values: (_, ticks) => ticks.map(tick => told(format, tick)), incrs: steps[format], size: 70 },
      ],
      series: [
        { label: xFormat === "seconds" ? "time" : xFormat, value: (_, value) => told(xFormat, value) },
        ...series.map(one => ({
          label: one.label, stroke: one.stroke, dash: one.dash, width: one.faint ? 1 : many && !one.limit ? 1 : 1.5,
          alpha: one.faint ? 0.35 : 1,
          points: { size: 4, filter: (_, index, all) => (all ? null : isolated(one.values)) },
          value: (_, value) => told(format, value),
        })),
      ],
    }, [x, ...series.map(one => one.values)], figure);
    if (many) figure.append(readout);
    figure.chart = chart;
    return figure;
  };

  // Distances between the ticks of an axis: round numbers of the unit in which it is read.
  const steps = {
    bytes: Array.from({ length: 50 }, (_, power) => 2 ** power),
    seconds: [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 432000, 864000, 2592000],
  };

  // The number, null for a value that is not a number, or undefined if there is no value.
  const drawn = value => (value === "nan" ? null : value ?? undefined);

  const formatOf = name => (name === "mfu" ? "share" : "number");

  const curves = () => {
    const place = document.getElementById("charts");
    if (!place) return;
    place.replaceChildren();
    for (const { title, columns } of data.charts) {
      const lines = data.runs.flatMap((run, number) => columns
        .filter(name => run.columns[name] && run.x[choice.x].length > 0)
        .map((name, which) => ({ run, name, number, which: columns.indexOf(name) })));
      if (lines.length === 0) continue;
      const tables = lines.map(({ run, name }) => [run.x[choice.x], run.columns[name].map(drawn)]);
      const [x, ...joined] = uPlot.join(tables, tables.map(() => [2, 2])); // 2: a gap extends to the values next to it
      const series = lines.flatMap(({ run, name, number, which }, index) => {
        const several = data.runs.length > 1;
        const one = {
          label: several ? run.label + (which ? ` ${name}` : "") : name,
          values: joined[index],
          stroke: stroke(several ? number : which),
          dash: several ? dashes[(which + Math.floor(number / 8)) % dashes.length] : dashes[which],
        };
        if (choice.smoothing === 0 || name.startsWith("eval_")) return [one];
        return [{ ...one, label: `${one.label} (each step)`, faint: true }, { ...one, values: smoothed(one.values, choice.smoothing) }];
      });
      draw(place, title, choice.x, formatOf(columns[0].replace(/^eval_/, "")), x, series, "metrics");
    }
  };

  const memory = () => {
    const place = document.getElementById("memory");
    if (!place) return;
    place.replaceChildren();
    for (const { title, x, series, lines } of data.memory) {
      const limits = Object.entries(lines).map(([label, value]) => ({
        label, values: x.map(() => value), stroke: label === "capacity" ? colour("--mark") : colour("--text"), dash: [8, 4], limit: true,
      }));
      const ranks = series.map((one, number) => ({ ...one, stroke: stroke(number), dash: dashes[Math.floor(number / 8) % dashes.length] }));
      draw(place, title, "seconds", "bytes", x, [...ranks, ...limits], "memory");
    }
  };

  // Each run is a line over axes from 0 to 1: one axis for each setting that differs, and the last for the result.
  const parallel = () => {
    const place = document.getElementById("parallel");
    if (!place) return;
    place.replaceChildren();
    const { axes, series } = data.parallel;
    formats.axis = value => (axes[value] ? String(value + 1) : ""); // the list below the chart has their names
    steps.axis = [1];
    formats.place = value => `${Math.round(value * 100)} %`;
    const lines = series.map((one, number) => ({ ...one, values: one.values.map(drawn), stroke: stroke(number), dash: dashes[Math.floor(number / 8) % dashes.length] }));
    draw(place, "from the least to the greatest value", "axis", "place", axes.map((_, index) => index), lines);
  };

  const controls = () => {
    const place = document.getElementById("controls");
    if (!place) return;
    const choose = document.createElement("select");
    for (const name of ["step", "tokens", "seconds"])
      if (data.runs.some(run => run.x[name].length > 0)) choose.append(new Option(name === "seconds" ? "time" : name, name));
    choose.onchange = () => { choice.x = choose.value; curves(); };
    const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
    slider.oninput = () => { choice.smoothing = Number(slider.value); curves(); };
    for (const [text, input] of [["over ", choose], ["smoothing ", slider]]) {
      const label = document.createElement("label");
      label.append(text, input);
      place.append(label);
    }
    place.append("drag to zoom, double-click to zoom out");
  };

  const open = () => document.querySelector(":target details")?.setAttribute("open", "");
  const everything = () => { parallel(); curves(); memory(); };
  controls();
  everything();
  open();
  addEventListener("hashchange", open);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
  addEventListener("beforeprint", () => { root.dataset.paper = ""; everything(); });
  addEventListener("afterprint", () => { delete root.dataset.paper; everything(); });
  let width = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    for (const figure of document.querySelectorAll("figure")) figure.chart.setSize({ width: figure.clientWidth, height: 220 });
  });
})();
