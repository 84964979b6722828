"use strict";
// A task on MuJoCo: its observation, its drives, and its ends. Between control steps the state is float32, as ejax's.

const clip = (x, bound) => (bound == null ? x : Math.min(Math.max(x, -bound), bound));

// rows of the rotation from the base's frame to the world's
function rotation([w, x, y, z]) {
  return [
    [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
    [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
    [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
  ];
}

const base = sim => rotation(sim.data.qpos.slice(3, 7));

// kind of an observation's term -> its numbers
const TERMS = {
  qpos: (sim, { joints, home, biased }, qpos = sim.data.qpos) =>
    joints.map((joint, i) => f32(qpos[joint] - f32(home[i])) + (biased ? sim.bias[i] : 0)),
  qvel: (sim, { joints }, qvel = sim.data.qvel) => joints.map(joint => qvel[joint]),
  difference: (sim, { of, minus, width }) => {
    const [x, y] = [of, minus].map(term => TERMS[term.kind](sim, term));
    return Array.from({ length: width }, (_, i) => f32(x[i] - y[i]));
  },
  site: (sim, { name }) => {
    sim.mujoco.mj_kinematics(sim.model, sim.data);
    const id = sim.mujoco.mj_name2id(sim.model, sim.mujoco.mjtObj.mjOBJ_SITE.value, name);
    return sim.data.site_xpos.slice(3 * id, 3 * id + 3);
  },
  base_lin_vel: (sim, _, rows = base(sim), v = sim.data.qvel) =>
    [0, 1, 2].map(k => rows[0][k] * v[0] + rows[1][k] * v[1] + rows[2][k] * v[2]),
  base_ang_vel: sim => sim.data.qvel.slice(3, 6),
  projected_gravity: sim => base(sim)[2].map(x => -x),
  command: sim => sim.command,
  action: sim => sim.action,
  phase: (sim, { period, step }) => {
    const angle = 2 * Math.PI * (sim.step * step / period % 1);
    return Math.hypot(...sim.command) < 0.1 ? [0, 0] : [Math.sin(angle), Math.cos(angle)];
  },
};

const ENDS = {
  tilt: (sim, { limit }) => base(sim)[2][2] < Math.cos(limit),
  near: (sim, { joints, limit, speed, below }, { qpos, qvel } = sim.data) =>
    Math.hypot(...joints.map((joint, i) => qpos[joint] - sim.command[i])) < limit &&
    (!speed || Math.hypot(...speed.joints.map(joint => qvel[joint])) < speed.limit) &&
    (!below || qpos[below.joint] < below.limit),
};

class Simulation {
  constructor(mujoco, task) {
    Object.assign(this, { mujoco, task });
    this.model = mujoco.MjModel.from_xml_string(task.model);
    // a step depends on the state alone, as in ejax
    this.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_WARMSTART.value;
    this.model.opt.enableflags &= ~mujoco.mjtEnableBit.mjENBL_SLEEP.value;
    this.data = new mujoco.MjData(this.model);
  }

  // the state at the episode's step t; `rows`: qpos, qvel, and of the task command, held (the last action), bias
  put(rows, t) {
    const none = new Float32Array(this.task.control.scale.length), row = name => rows[name]?.[t] ?? none;
    this.mujoco.mj_resetData(this.model, this.data);
    this.data.qpos.set(rows.qpos[t]);
    this.data.qvel.set(rows.qvel[t]);
    [this.command, this.action, this.bias, this.step] = [row("command"), row("held"), row("bias"), t];
  }

  // puts what only marks the command, and is no part of the physics, in its place
  mark() {
    const { model, data, mujoco, task: { command } } = this;
    if (!command.body) return;
    const body = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY.value, command.body);
    data.mocap_pos.set(this.command, 3 * model.body_mocapid[body]);
  }

  observe() {
    return Float32Array.from(this.task.observation.flatMap(term => Array.from(TERMS[term.kind](this, term))));
  }

  act(action) {
    const { scale, home, joints, bound, limit } = this.task.control, { data } = this;
    this.action = Float32Array.from(action, a => clip(a, bound));
    const at = home ?? joints.map(joint => data.qpos[joint]);
    data.ctrl.set(this.action.map((a, i) => f32(f32(at[i]) + clip(f32(f32(scale[i]) * a), limit)) - this.bias[i]));
    for (let i = 0; i < this.task.substeps; i++) this.mujoco.mj_step(this.model, data);
    for (const each of [data.qpos, data.qvel]) each.set(Float32Array.from(each));
    this.step += 1;
  }

  get ended() {
    const { end } = this.task;
    return !this.data.qpos.every(Number.isFinite) || Boolean(end && ENDS[end.kind](this, end));
  }
}

const farthest = (a, b, noise = []) => {
  let most = 0;
  for (let i = 0; i < a.length; i++) most = Math.max(most, Math.abs(a[i] - b[i]) - (noise[i] ?? 0));
  return Number.isNaN(most) ? Infinity : most;
};

// Replays the reference episode: each step from JAX's own state, then the whole of it by the page alone, with JAX's
// commands and sensor noise. `see(part)` is awaited after each step. Returns the largest differences from JAX.
async function prove(sim, policy, rows, see = async () => {}) {
  const length = rows.action.length, drawn = [], { period, observation } = sim.task;
  const worst = { action: 0, observation: 0, step: 0, second: 0, whole: 0, alike: 0, length };
  sim.put(rows, 0);
  const noise = observation.flatMap(term => Array(TERMS[term.kind](sim, term).length).fill(term.noise ?? 0));
  for (let t = 0; t < length; t++) {
    worst.action = Math.max(worst.action, farthest(policy(rows.observation[t]), rows.action[t]));
    sim.put(rows, t);
    const seen = sim.observe();
    worst.observation = Math.max(worst.observation, farthest(seen, rows.observation[t], noise));
    drawn.push(rows.observation[t].map((x, i) => (noise[i] ? x - seen[i] : 0)));
    sim.act(rows.action[t]);
    worst.step = Math.max(worst.step, farthest(sim.data.qpos, rows.qpos[t + 1]));
    await see(t / (2 * length));
  }
  sim.put(rows, 0);
  for (let t = 0; t < worst.length; t++) {
    sim.act(policy(sim.observe().map((x, i) => x + drawn[t][i])));
    worst.whole = Math.max(worst.whole, farthest(sim.data.qpos, rows.qpos[t + 1]));
    if ((t + 1) * period <= 1) worst.second = worst.whole;
    if (worst.whole < 1e-3) worst.alike = t + 1;
    sim.command = rows.command[t + 1];
    if (rows.push_in && rows.push_in[t + 1][0] > rows.push_in[t][0]) worst.length = t + 1; // no push is repeated
    await see((length + t) / (2 * length));
  }
  return worst;
}
