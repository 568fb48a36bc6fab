async page => {
  const view = page.defaultView;
  const settle = () => new Promise(done => setTimeout(done, 50));
  const figures = () => [...page.querySelectorAll("figure")];
  const chart = () => figures()[0].chart;
  const mouse = (target, type, x) => {
    const box = chart().over.getBoundingClientRect();
    const at = { clientX: box.left + box.width * x, clientY: box.top + box.height / 2 };
    target.dispatchEvent(new view.MouseEvent(type, { bubbles: true, button: 0, movementX: 1, view, ...at }));
  };
  const range = () => [chart().scales.x.min, chart().scales.x.max];
  await settle();

  const rgb = text => text.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(part => part / 255)
    .map(part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(view.getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = {};
  for (const element of page.querySelectorAll("body *")) {
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!text || ["SCRIPT", "NOSCRIPT", "STYLE", "OPTION", "SELECT"].includes(element.tagName)) continue;
    const name = `${element.tagName}.${element.className}`;
    const found = ratio(rgb(view.getComputedStyle(element).color), behind(element));
    contrast[name] = Math.min(found, contrast[name] ?? Infinity);
  }

  const painted = figure => {
    const canvas = figure.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const wanted = new Set(figure.chart.series.slice(1).map(one => {
      const probe = page.createElement("i");
      probe.style.color = one.stroke();
      page.body.append(probe);
      const colour = rgb(view.getComputedStyle(probe).color).join();
      probe.remove();
      return colour;
    }));
    for (let at = 0; at < pixels.length; at += 4) wanted.delete(`${pixels[at]},${pixels[at + 1]},${pixels[at + 2]}`);
    return wanted.size === 0;
  };
  const lines = {};
  for (let number = 0; number < 8; number++) {
    const probe = page.createElement("i");
    probe.style.color = `var(--c${number})`;
    page.body.append(probe);
    lines[number] = ratio(rgb(view.getComputedStyle(probe).color), behind(page.body));
    probe.remove();
  }
  const found = {
    titles: figures().map(figure => figure.querySelector("figcaption").textContent),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    contrast, lines,
    drawn: figures().map(painted),
  };

  mouse(chart().over, "mouseenter", 0.5);
  mouse(chart().over, "mousemove", 0.5);
  await settle();
  found.hovered = Object.fromEntries([...figures()[0].querySelectorAll(".u-series")].map(
    row => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]));

  mouse(chart().over, "mousedown", 0.25);
  mouse(chart().over, "mousemove", 0.6);
  mouse(page, "mouseup", 0.6);
  await settle();
  found.zoomed = range();
  mouse(chart().over, "dblclick", 0.5);
  await settle();
  found.after_double_click = range();

  const slider = page.querySelector("#controls input");
  slider.value = 0.9;
  slider.dispatchEvent(new view.Event("input"));
  await settle();
  found.smoothed = chart().series.slice(1).map(one => one.label);
  const over = page.querySelector("#controls select");
  over.value = "tokens";
  over.dispatchEvent(new view.Event("change"));
  await settle();
  found.over_tokens = [...chart().data[0]];

  view.dispatchEvent(new view.Event("beforeprint"));
  found.paper = rgb(view.getComputedStyle(page.body).backgroundColor);
  view.dispatchEvent(new view.Event("afterprint"));

  page.querySelector(".failure a").click();
  await settle();
  found.opened = page.querySelector(":target details")?.open ?? false;
  return found;
}
