// SPDX-License-Identifier: Apache-2.0
({
  // Checks of the open page; each returns its faults. Run by Playwright, never by the report itself.
  invisible() {
    for (const d of document.querySelectorAll("details")) d.open = true;
    const boxes = [...document.querySelectorAll("table, img, h1, h2, h3, dl")];
    const hidden = boxes.filter((e) => { const b = e.getBoundingClientRect(); return b.width <= 0 || b.height <= 0; });
    const broken = [...document.images].filter((i) => !i.complete || i.naturalWidth === 0);
    return [...hidden, ...broken].map((e) => `${e.tagName} in ${e.closest("[id]")?.id} is not to be seen`);
  },
  links() {
    const faults = [];
    for (const a of document.querySelectorAll("a")) {
      const href = a.getAttribute("href") ?? "";
      if (!href.startsWith("#") || !document.getElementById(href.slice(1))) faults.push(`${href} leads nowhere`);
    }
    return [...new Set(faults)];
  },
  overflow() {
    for (const d of document.querySelectorAll("details")) d.open = true;
    const width = document.documentElement.clientWidth;
    const faults = document.documentElement.scrollWidth > width ? [`page: ${document.documentElement.scrollWidth} of ${width} px`] : [];
    for (const e of document.querySelectorAll("main *, header *, nav *, footer *")) {
      if (e.closest(".scroll, .plate") && !e.matches(".scroll, .plate")) continue; // scrolls in its own box
      if (e.getBoundingClientRect().right > width + 0.5) faults.push(`${e.tagName} in ${e.closest("[id]")?.id}`);
    }
    return faults.slice(0, 20);
  },
  contrast() {
    for (const d of document.querySelectorAll("details")) d.open = true;
    const parse = (c) => {
      const n = c.match(/[\d.]+/g).map(Number);
      return c.startsWith("rgb") ? [n[0], n[1], n[2], n[3] ?? 1] : [0, 0, 0, NaN];
    };
    const light = (rgb) => {
      const [r, g, b] = rgb.slice(0, 3).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const worst = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const e = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || e.closest("script, style")) continue;
      const ink = parse(getComputedStyle(e).color);
      let on = e, paper = [255, 255, 255, 0];
      while (on && paper[3] === 0) { paper = parse(getComputedStyle(on).backgroundColor); on = on.parentElement; }
      const [hi, lo] = [light(ink), light(paper)].sort((a, b) => b - a);
      // A colour that is not plain rgb, or not opaque, cannot be judged here and is a fault.
      const ratio = ink[3] === 1 && paper[3] === 1 ? (hi + 0.05) / (lo + 0.05) : 0;
      const key = `${e.tagName}.${e.className} ${ink} on ${paper}`;
      worst.set(key, Math.min(ratio, worst.get(key) ?? 99));
    }
    return { faults: [...worst].filter(([, r]) => !(r >= 4.5)).map(([k, r]) => `${k}: ${r.toFixed(2)}`), kinds: worst.size, least: Math.min(...worst.values()) };
  },
  structure() {
    const faults = [];
    const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((h) => Number(h.tagName[1]));
    if (levels.filter((n) => n === 1).length !== 1) faults.push("not one h1");
    levels.forEach((n, i) => { if (i && n > levels[i - 1] + 1) faults.push(`a heading of level ${n} after ${levels[i - 1]}`); });
    for (const th of document.querySelectorAll("th")) if (!th.scope) faults.push(`th without scope: ${th.textContent}`);
    for (const i of document.images) if ((i.alt ?? "").length < 20) faults.push(`image without a description: ${i.closest("[id]")?.id}`);
    for (const t of document.querySelectorAll("table")) if (!t.querySelector("thead th")) faults.push(`table without a head in ${t.closest("[id]")?.id}`);
    for (const s of document.querySelectorAll(".scroll, .plate")) if (s.tabIndex !== 0 || !s.ariaLabel) faults.push("a box that scrolls, without keyboard or name");
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    for (const id of ids.filter((x, i) => ids.indexOf(x) !== i)) faults.push(`two elements have id ${id}`);
    if (!document.documentElement.lang || !document.querySelector("main") || !document.querySelector("nav")) faults.push("no language, main or nav");
    return faults;
  },
})
