"use strict";
// The page: unpacks MuJoCo, replays the reference episode, then lets the visitor command and push.

const by = id => document.getElementById(id);

async function unzip(id) {
  const bytes = Uint8Array.from(atob(by(id).textContent), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

async function loadEngine() {
  const source = new Blob([await (await unzip("js")).text()], { type: "text/javascript" });
  const { default: load } = await import(URL.createObjectURL(source));
  return load({ wasmBinary: await (await unzip("wasm")).arrayBuffer(), locateFile: name => name });
}

const digits = x => (x === 0 ? "0" : x.toExponential(1));

function showProof(worst, { period, observation }) {
  const noisy = observation.some(term => term.noise);
  const seconds = count => `${(count * period).toFixed(1)} s`;
  const rows = [
    ["Action, for JAX's observations", digits(worst.action)],
    [`Observation, for JAX's states${noisy ? ", beyond its noise" : ""}`, digits(worst.observation)],
    ["State one step after JAX's", digits(worst.step)],
    [`State, played alone for ${seconds(Math.min(worst.length, 1 / period))}`, digits(worst.second)],
    [`State, played alone for ${seconds(worst.length)}`, digits(worst.whole)],
    ["State, played alone, below 0.001 for", seconds(worst.alike)],
  ];
  by("proof").replaceChildren(...rows.map(cells => {
    const row = document.createElement("tr");
    row.append(...cells.map(cell => Object.assign(document.createElement("td"), { textContent: cell })));
    return row;
  }));
}

// keys, as in MuJoCo's viewer: command, axis and sign
const AXES = {
  velocity: {
    ArrowUp: [0, 0.1], ArrowDown: [0, -0.1], ArrowLeft: [2, 0.1], ArrowRight: [2, -0.1], 7: [1, 0.1], 9: [1, -0.1],
  },
  place: { ArrowUp: [1, 0.02], ArrowDown: [1, -0.02], ArrowLeft: [0, -0.02], ArrowRight: [0, 0.02] },
};
const HELP = {
  velocity: "arrows: faster, slower, turn · 7, 9: sideways · 8: stop", place: "arrows: move the goal",
};

class Player {
  constructor(sim, policy, rows, drawing) {
    Object.assign(this, { sim, policy, rows, drawing, paused: false, debt: 0, endedFor: 0, drag: null });
    this.kind = sim.task.command.kind;
    const common = "drag a body: push it · drag the ground: turn the view · wheel: nearer · space: pause · R: again";
    by("keys").textContent = `${HELP[this.kind]} · ${common}`;
    this.listen(drawing.canvas);
    this.start();
  }

  start() {
    this.sim.put(this.rows, 0);
    this.sim.bias = this.sim.bias.map(() => 0); // it was that episode's
    this.sim.command = Float32Array.from(this.sim.command);
    [this.endedFor, this.drag] = [0, null];
    this.show();
  }

  show() {
    const { sim } = this, [x, y, turn] = Array.from(sim.command, each => each.toFixed(2));
    const now = { place: `goal: ${x}, ${y} m`, velocity: `command: ${x}, ${y} m/s, ${turn} rad/s` }[this.kind];
    const time = this.endedFor ? "the end" : this.paused ? "paused" : `${(sim.step * sim.task.period).toFixed(1)} s`;
    by("status").textContent = `${time} · ${now}`;
  }

  press(key) {
    const { sim } = this, [axis, change] = AXES[this.kind][key] ?? [];
    if (key === "r" || key === "R") this.start();
    else if (key === " ") this.paused = !this.paused;
    else if (key === "8" && this.kind === "velocity") sim.command.fill(0);
    else if (axis !== undefined) {
      const [low, high] = sim.task.command.ranges?.[axis] ?? [-Infinity, Infinity]; // those of the training
      sim.command[axis] = Math.min(Math.max(Math.round(100 * (sim.command[axis] + change)) / 100, low), high);
    } else return false;
    return true;
  }

  listen(canvas) {
    const { camera } = this.drawing, place = event => [
      2 * event.clientX / canvas.clientWidth - 1, 1 - 2 * event.clientY / canvas.clientHeight];
    addEventListener("keydown", event => this.press(event.key) && event.preventDefault());
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId);
      this.drag = { body: this.drawing.pick(camera.ray(...place(event))), at: place(event) };
    });
    canvas.addEventListener("pointermove", event => {
      if (!this.drag) return;
      if (!this.drag.body) {
        camera.azimuth -= 0.006 * event.movementX;
        camera.height = Math.min(Math.max(camera.height + 0.006 * event.movementY, -0.1), 1.5);
      }
      this.drag.at = place(event);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { this.drag = null; });
    canvas.addEventListener("wheel", event => {
      camera.distance *= Math.exp(0.001 * event.deltaY);
      event.preventDefault();
    }, { passive: false });
  }

  // a spring from the body's middle to the mouse, damped; returns its two ends
  pull() {
    const { sim: { data, model }, drawing: { camera }, drag } = this;
    data.xfrc_applied.fill(0);
    if (!drag?.body) return null;
    const from = Array.from(data.xipos.slice(3 * drag.body, 3 * drag.body + 3)), ray = camera.ray(...drag.at);
    const depth = dot(plus(from, camera.eye, -1), camera.back) / dot(ray, camera.back);
    const to = plus(camera.eye, ray, depth), far = plus(to, from, -1), length = Math.max(1, Math.hypot(...far));
    const mass = model.body_subtreemass[model.body_rootid[drag.body]];
    const velocity = drag.last ? plus(from, drag.last, -1).map(x => x / this.sim.task.period) : [0, 0, 0];
    drag.last = from;
    data.xfrc_applied.set(plus(far.map(x => 20 * mass * x / length), velocity, -2 * mass), 6 * drag.body);
    return [from, to];
  }

  frame(elapsed) {
    const { sim, drawing } = this, { period } = sim.task;
    this.debt = Math.min(this.debt + (this.paused ? 0 : elapsed), 4 * period); // a slow machine plays slowly
    for (; this.debt >= period; this.debt -= period) {
      this.endedFor = sim.ended ? this.endedFor + period : 0; // it stands still for a second
      if (this.endedFor > 1) this.start();
      if (this.endedFor) continue;
      this.line = this.pull();
      sim.act(this.policy(sim.observe()));
    }
    this.show();
    if (this.kind === "velocity") drawing.camera.target.splice(0, 2, ...sim.data.qpos.slice(0, 2));
    drawing.draw(this.drag?.body ? this.line : null);
  }
}

async function main() {
  const { task, policy: weights, episode, steps, title, checkpoint, versions } = JSON.parse(by("data").textContent);
  document.title = by("title").textContent = title;
  by("versions").textContent = `${checkpoint} · JAX's episode: MuJoCo ${versions.mujoco} and JAX ${versions.jax} · `
    + `this page runs MuJoCo ${versions.wasm} (Apache License 2.0, Google DeepMind) and loads nothing`;
  by("about").textContent = `Largest differences from JAX over the reference episode, episode.json of the export: `
    + `seed ${episode.seed}, ${episode.result.length} steps, return ${episode.result.return.toFixed(2)}.`;
  const sim = new Simulation(await loadEngine(), task), policy = makePolicy(weights);
  const rows = Object.fromEntries(Object.entries(steps).map(([name, packed]) => [name, unpack(packed)]));
  sim.put(rows, 0);
  let drawing = null, missing = null, last = performance.now();
  try { drawing = new Drawing(by("view"), sim); } catch (error) { missing = error; } // it can be proved all the same
  const worst = await prove(sim, policy, rows, async part => {
    if (performance.now() - last < 30) return;
    by("status").textContent = `JAX's episode is being replayed: ${Math.round(100 * part)} %`;
    drawing?.draw();
    last = await new Promise(requestAnimationFrame);
  });
  showProof(worst, task);
  if (missing) throw missing;
  const player = new Player(sim, policy, rows, drawing);
  window.ejax = { worst, player };
  requestAnimationFrame(function next(now) {
    player.frame(Math.max(now - last, 0) / 1000);
    last = now;
    requestAnimationFrame(next);
  });
}

main().catch(error => {
  by("status").textContent = `This page cannot play here: ${error.message}`;
  by("status").className = "bad";
  throw error;
});
