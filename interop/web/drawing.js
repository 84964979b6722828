"use strict";
// MuJoCo's geoms in WebGL 2: planes, spheres, capsules, ellipsoids, cylinders and boxes, with shadows on the floor.

const VERTEX = `#version 300 es
uniform mat4 view, place; in vec3 point, normal; out vec3 at, up;
void main() {
  vec4 p = place * vec4(point, 1.0);
  at = p.xyz; up = transpose(inverse(mat3(place))) * normal; gl_Position = view * p;
}`;
const FRAGMENT = `#version 300 es
precision highp float;
uniform vec4 color; uniform vec3 eye; uniform float floorScale, shade; in vec3 at, up; out vec4 seen;
const vec3 SKY = vec3(0.86, 0.90, 0.95), LIGHT = vec3(0.41, -0.31, 0.86);
void main() {
  if (shade > 0.0) { seen = vec4(0.05, 0.08, 0.15, 0.28); return; }
  vec3 n = normalize(up), c = color.rgb;
  if (floorScale > 0.0) {
    vec2 square = floor(at.xy / floorScale);
    c = mix(vec3(0.74, 0.77, 0.80), vec3(0.66, 0.69, 0.73), mod(square.x + square.y, 2.0));
  }
  float shine = pow(max(dot(n, normalize(LIGHT + normalize(eye - at))), 0.0), 40.0) * (floorScale > 0.0 ? 0.0 : 0.25);
  c *= 0.45 + 0.6 * max(dot(n, LIGHT), 0.0);
  float far = floorScale > 0.0 ? smoothstep(6.0, 30.0, distance(eye, at) / floorScale / 2.0) : 0.0;
  seen = vec4(mix(c + shine, SKY, far), color.a);
}`;

const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const plus = (a, b, k = 1) => [a[0] + k * b[0], a[1] + k * b[1], a[2] + k * b[2]];
const unit = a => { const length = Math.hypot(...a) || 1; return a.map(x => x / length); };

// triangles of a surface point(u, v) = [point, normal], u and v from 0 to 1
function surface(point, nu, nv) {
  const numbers = [];
  for (let i = 0; i < nu; i++) for (let j = 0; j < nv; j++)
    for (const [a, b] of [[0, 0], [1, 0], [1, 1], [0, 0], [1, 1], [0, 1]])
      numbers.push(...point((i + a) / nu, (j + b) / nv).flat());
  return numbers;
}

const TURN = 2 * Math.PI;
const ball = (u, v) => {
  const s = Math.sin(Math.PI * v), p = [s * Math.cos(TURN * u), s * Math.sin(TURN * u), Math.cos(Math.PI * v)];
  return [p, p];
};
const wall = (u, v, c = Math.cos(TURN * u), s = Math.sin(TURN * u)) => [[c, s, 2 * v - 1], [c, s, 0]];
const lid = side => (u, v) => [[v * Math.cos(TURN * u), v * Math.sin(TURN * u), side], [0, 0, side]];
const ground = (u, v) => [[2 * u - 1, 2 * v - 1, 0], [0, 0, 1]];
const face = (axis, side) => (u, v) => {
  const p = [2 * u - 1, 2 * v - 1], n = [0, 0, 0];
  p.splice(axis, 0, side);
  n[axis] = side;
  return [p, n];
};
const SHAPES = {
  ball: surface(ball, 24, 16), tube: surface(wall, 24, 1), plane: surface(ground, 1, 1),
  lids: [...surface(lid(1), 24, 1), ...surface(lid(-1), 24, 1)],
  box: [0, 1, 2].flatMap(axis => [-1, 1].flatMap(side => surface(face(axis, side), 1, 1))),
};

// type of a geom, size -> its parts: [shape, scale, height along its axis]
function partsOf(types, type, [a, b, c]) {
  switch (type) {
    case types.mjGEOM_PLANE.value: return [["plane", [a || 60, b || 60, 1], 0]];
    case types.mjGEOM_SPHERE.value: return [["ball", [a, a, a], 0]];
    case types.mjGEOM_CAPSULE.value:
      return [["tube", [a, a, b], 0], ["ball", [a, a, a], b], ["ball", [a, a, a], -b]];
    case types.mjGEOM_ELLIPSOID.value: return [["ball", [a, b, c], 0]];
    case types.mjGEOM_CYLINDER.value: return [["tube", [a, a, b], 0], ["lids", [a, a, b], 0]];
    case types.mjGEOM_BOX.value: return [["box", [a, b, c], 0]];
    default: return [];
  }
}

// column by column, as WebGL takes them
const product = (a, b) => Array.from({ length: 16 }, (_, i) =>
  [0, 1, 2, 3].reduce((sum, k) => sum + a[4 * k + i % 4] * b[4 * (i >> 2) + k], 0));

class Camera { // it begins as the model's first one
  constructor({ model, data }) {
    const { center, extent } = model.stat;
    Object.assign(this, { target: Array.from(center), distance: 2 * extent, azimuth: 0.8, height: 0.45 });
    if (model.ncam === 0) return;
    const eye = Array.from(data.cam_xpos.slice(0, 3)), back = [2, 5, 8].map(i => data.cam_xmat[i]);
    this.distance = Math.max(dot(plus(eye, this.target, -1), back), 0.3 * extent);
    [this.azimuth, this.height] = [Math.atan2(back[1], back[0]), Math.asin(Math.min(Math.max(back[2], -1), 1))];
    this.target = plus(eye, back, -this.distance);
  }

  look(aspect) {
    const { azimuth, height, distance } = this;
    this.back = [Math.cos(height) * Math.cos(azimuth), Math.cos(height) * Math.sin(azimuth), Math.sin(height)];
    this.right = [-Math.sin(azimuth), Math.cos(azimuth), 0];
    this.up = cross(this.back, this.right);
    this.eye = plus(this.target, this.back, distance);
    const { right, up, back, eye } = this, near = 0.02, far = 200;
    [this.aspect, this.focus] = [aspect, Math.min(1, aspect) / Math.tan(0.36)];
    const turn = [0, 1, 2].flatMap(i => [right[i], up[i], back[i], 0]), depth = 1 / (near - far);
    const place = [...turn, -dot(right, eye), -dot(up, eye), -dot(back, eye), 1];
    const lens = [[this.focus / aspect, 0, 0, 0], [0, this.focus, 0, 0], [0, 0, (near + far) * depth, -1]];
    return product([...lens.flat(), 0, 0, 2 * near * far * depth, 0], place);
  }

  // the direction in which a pixel lies; x and y from -1 to 1
  ray(x, y) {
    return unit(plus(plus(this.back.map(b => -b), this.right, x * this.aspect / this.focus), this.up, y / this.focus));
  }
}

class Drawing {
  constructor(canvas, sim) {
    const gl = canvas.getContext("webgl2", { stencil: true, antialias: true, alpha: false });
    if (!gl) throw new Error("this browser has no WebGL 2");
    const program = gl.createProgram();
    for (const [kind, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
    gl.useProgram(program);
    Object.assign(this, { canvas, gl, sim, at: {}, spans: {} });
    for (const name of ["view", "place", "color", "eye", "floorScale", "shade"])
      this.at[name] = gl.getUniformLocation(program, name);
    const numbers = [];
    for (const [name, points] of Object.entries(SHAPES)) {
      this.spans[name] = [numbers.length / 6, points.length / 6];
      numbers.push(...points);
    }
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
    gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(numbers), gl.STATIC_DRAW);
    ["point", "normal"].forEach((name, i) => {
      const slot = gl.getAttribLocation(program, name);
      gl.enableVertexAttribArray(slot);
      gl.vertexAttribPointer(slot, 3, gl.FLOAT, false, 24, 12 * i);
    });
    this.geoms = Drawing.read(sim);
    sim.mujoco.mj_forward(sim.model, sim.data);
    this.camera = new Camera(sim);
    this.scale = sim.model.stat.extent > 1 ? 0.4 : 0.2;
  }

  // what can be seen of the model
  static read({ model, mujoco }) {
    const geoms = [];
    for (let i = 0; i < model.ngeom; i++) {
      const own = model.geom_rgba.slice(4 * i, 4 * i + 4), material = model.geom_matid[i];
      const gray = own.every((x, k) => x === [0.5, 0.5, 0.5, 1][k]);
      const color = material >= 0 && gray ? model.mat_rgba.slice(4 * material, 4 * material + 4) : own;
      if (model.geom_group[i] > 2 || color[3] === 0) continue;
      const parts = partsOf(mujoco.mjtGeom, model.geom_type[i], model.geom_size.slice(3 * i, 3 * i + 3));
      geoms.push({ i, body: model.geom_bodyid[i], parts, color, isFloor: parts[0]?.[0] === "plane" });
    }
    return geoms.sort((a, b) => b.color[3] - a.color[3]); // what is transparent last
  }

  draw(line) {
    const { gl, at, canvas, camera, sim } = this, { data, model, mujoco } = sim, ratio = window.devicePixelRatio;
    sim.mark();
    mujoco.mj_kinematics(model, data);
    [canvas.width, canvas.height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio];
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(0.86, 0.9, 0.95, 1);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT | gl.STENCIL_BUFFER_BIT);
    for (const each of [gl.DEPTH_TEST, gl.BLEND]) gl.enable(each);
    gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
    gl.uniformMatrix4fv(at.view, false, camera.look(canvas.width / canvas.height));
    gl.uniform3fv(at.eye, camera.eye);
    const { geom_xpos, geom_xmat } = data;
    const show = (geom, before) => {
      const m = geom_xmat.subarray(9 * geom.i, 9 * geom.i + 9), p = geom_xpos.subarray(3 * geom.i, 3 * geom.i + 3);
      gl.uniform4fv(at.color, geom.color);
      gl.uniform1f(at.floorScale, geom.isFloor ? this.scale : 0);
      for (const [shape, scale, height] of geom.parts) {
        const columns = [0, 1, 2].flatMap(k => [m[k] * scale[k], m[3 + k] * scale[k], m[6 + k] * scale[k], 0]);
        const place = [...columns, ...[0, 1, 2].map(k => p[k] + height * m[3 * k + 2]), 1];
        gl.uniformMatrix4fv(at.place, false, before ? product(before, place) : place);
        gl.drawArrays(gl.TRIANGLES, ...this.spans[shape]);
      }
    };
    gl.uniform1f(at.shade, 0);
    for (const geom of this.geoms.filter(each => each.isFloor)) show(geom);
    gl.uniform1f(at.shade, 1);
    gl.enable(gl.STENCIL_TEST); // each place is darkened once
    gl.stencilFunc(gl.EQUAL, 0, 255);
    gl.stencilOp(gl.KEEP, gl.KEEP, gl.INCR);
    const flat = [1, 0, 0, 0, 0, 1, 0, 0, -0.48, 0.36, 0, 0, 0, 0, 0.002, 1];
    for (const geom of this.geoms.filter(each => !each.isFloor && each.color[3] === 1)) show(geom, flat);
    gl.disable(gl.STENCIL_TEST);
    gl.uniform1f(at.shade, 0);
    for (const geom of this.geoms.filter(each => !each.isFloor)) show(geom);
    for (let k = 0; line && k <= 12; k++) { // the mouse's pull
      const p = plus(line[0], plus(line[1], line[0], -1), k / 12), r = 0.008 * camera.distance / 2;
      gl.uniform4fv(at.color, [0.85, 0.15, 0.1, 1]);
      gl.uniformMatrix4fv(at.place, false, [r, 0, 0, 0, 0, r, 0, 0, 0, 0, r, 0, ...p, 1]);
      gl.drawArrays(gl.TRIANGLES, ...this.spans.ball);
    }
  }

  // the moving body nearest to the eye whose geoms' spheres the ray meets; 0: none
  pick(ray) {
    const { data, model } = this.sim, { eye } = this.camera;
    let [found, nearest] = [0, Infinity];
    for (const { i, body } of this.geoms) {
      if (model.body_weldid[body] === 0) continue;
      const way = plus(Array.from(data.geom_xpos.slice(3 * i, 3 * i + 3)), eye, -1), along = dot(way, ray);
      const off = Math.hypot(...plus(way, ray, -along));
      if (off < model.geom_rbound[i] && along > 0 && along < nearest) [found, nearest] = [body, along];
    }
    return found;
  }
}
