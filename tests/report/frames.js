// Opens PAGE in a frame of each width, and writes what `measure` finds there, as JSON, into the document.
const widths = [1280, 400], found = {}, measure = MEASURE;
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:4000px;border:0`;
  frame.src = "PAGE";
  frame.onload = async () => {
    const page = frame.contentDocument, root = page.documentElement;
    const overflow = root.scrollWidth - root.clientWidth;
    found[width] = { overflow, ...(await measure(page)) };
    if (Object.keys(found).length == widths.length) {
      const told = document.createElement("pre");
      told.textContent = JSON.stringify(found);
      document.body.append(told);
    }
  };
  document.body.append(frame);
}
