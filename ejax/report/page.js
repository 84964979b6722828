const tip = document.getElementById('tip');
const numbers = text => text.split(' ').map(x => x === '-' ? NaN : Number(x));
const shown = x => Number.isNaN(x) ? 'not finite' : x.toLocaleString('en', {maximumSignificantDigits: 6});
for (const svg of document.querySelectorAll('svg.curves')) {
  const [left, right, , , low, high] = numbers(svg.dataset.frame);
  const cursor = svg.querySelector('.cursor');
  let lines;
  svg.addEventListener('pointermove', event => {
    lines ??= [...svg.querySelectorAll('path.line')].map(path => {
      const d = path.dataset, line = {label: d.label, colour: path.classList[1], runs: d.runs};
      for (const name of ['x', 'y', 'low', 'high', 'n']) if (d[name]) line[name] = numbers(d[name]);
      return line;
    });
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = low + (place - left) / (right - left) * (high - low);
    const rows = lines.map(line => {
      let i = 0;
      line.x.forEach((x, j) => { if (Math.abs(x - step) < Math.abs(line.x[i] - step)) i = j; });
      return {line, i};
    });
    const at = rows.map(({line, i}) => line.x[i]).sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0];
    const x = left + (at - low) / (high - low) * (right - left);
    cursor.setAttribute('x1', x); cursor.setAttribute('x2', x);
    tip.replaceChildren(...[`${at.toLocaleString('en')} ${svg.dataset.xName}`, ...rows].map(row => {
      const div = document.createElement('div');
      if (typeof row === 'string') { div.textContent = row; return div; }
      const {line, i} = row, swatch = document.createElement('i');
      swatch.className = `swatch ${line.colour}`;
      const spread = line.n ? ` [${shown(line.low[i])}, ${shown(line.high[i])}], ${line.n[i]} of ${line.runs} runs` : '';
      const where = line.x[i] === at ? '' : ` at ${line.x[i].toLocaleString('en')}`;
      div.append(swatch, `${line.label}: ${shown(line.y[i])}${spread}${where}`);
      return div;
    }));
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
  });
  svg.addEventListener('pointerleave', () => {
    tip.hidden = true; cursor.setAttribute('x1', -9); cursor.setAttribute('x2', -9);
  });
}
