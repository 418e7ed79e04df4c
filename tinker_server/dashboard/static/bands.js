// Several runs as one curve: the mean at each place on the x axis, and a band of a standard deviation around it.

// The value of a line at x, between its points; null outside of them.
function valueAt(xs, ys, x, start) {
  let index = start.at;
  while (index < xs.length && xs[index] < x) index += 1;
  start.at = index;
  if (index === xs.length) return null;
  if (xs[index] === x) return ys[index];
  if (index === 0) return null;
  const part = (x - xs[index - 1]) / (xs[index] - xs[index - 1]);
  return ys[index - 1] + part * (ys[index] - ys[index - 1]);
}

// `lines` have xs and ys, which may have gaps. Returns xs, means, and the band's edges.
export function meanAndBand(lines) {
  const known = lines.map(([xs, ys]) => [xs.filter((_, index) => ys[index] !== null), ys.filter((value) => value !== null)]);
  const xs = [...new Set(known.flatMap(([line]) => line))].sort((one, other) => one - other);
  const starts = known.map(() => ({ at: 0 }));
  const means = [], lows = [], highs = [];
  for (const x of xs) {
    const values = known.map(([of, ys], index) => valueAt(of, ys, x, starts[index])).filter((value) => value !== null);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length);
    means.push(mean);
    lows.push(mean - deviation);
    highs.push(mean + deviation);
  }
  return [xs, means, lows, highs];
}
