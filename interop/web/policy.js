"use strict";
// The policy, an MLP. Each layer's numbers are rounded to float32, as JAX's are; the sums inside a layer are float64.

const f32 = Math.fround;

// Abramowitz and Stegun 7.1.26: within 1.5e-7
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - tail * Math.exp(-x * x));
}

const silu = x => x / (1 + Math.exp(-x));
const ACTIVATIONS = {
  relu: x => Math.max(x, 0), elu: x => (x > 0 ? x : Math.expm1(x)), tanh: Math.tanh,
  gelu: x => 0.5 * x * (1 + erf(x * Math.SQRT1_2)), silu, swish: silu, none: x => x,
};

// {width, data: base64 of float32} -> rows
function unpack({ width, data }) {
  const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
  const all = new Float32Array(bytes.buffer);
  return Array.from({ length: all.length / width }, (_, i) => all.subarray(i * width, (i + 1) * width));
}

function normalized(x) {
  const average = y => y.reduce((sum, each) => sum + each, 0) / y.length, mean = average(x);
  const variance = average(x.map(each => (each - mean) ** 2));
  return x.map(each => (each - mean) / Math.sqrt(variance + 1e-5));
}

// the most probable action for an observation, in the environment's units
function makePolicy({ linear, norm, normalizer, activation, last, squashed }) {
  const layers = linear.map(([weight, bias]) => [unpack(weight), unpack(bias)[0]]);
  const norms = norm?.map(each => each.map(x => unpack(x)[0]));
  const [mean, deviation] = normalizer?.map(x => unpack(x)[0]) ?? [];
  return observation => {
    let x = Float32Array.from(observation); // whose map rounds to float32
    if (normalizer) x = x.map((each, i) => f32(each - mean[i]) / f32(deviation[i] + f32(1e-2)));
    layers.forEach(([weight, bias], k) => {
      x = bias.map((b, i) => b + weight[i].reduce((sum, w, j) => sum + w * x[j], 0));
      if (norms?.[k]) x = normalized(x).map((each, i) => each * norms[k][0][i] + norms[k][1][i]);
      x = x.map(ACTIVATIONS[k < layers.length - 1 ? activation : last]);
    });
    if (!squashed) return x;
    const [low, high] = squashed;
    return x.map((u, i) => (low[i] + high[i]) / 2 + (high[i] - low[i]) / 2 * Math.tanh(u));
  };
}
