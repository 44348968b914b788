"""Reinforcement learning with actors: rollout workers, trajectory pool, trainer, weight sync and validator.

python examples/11_actors.py                            on this machine
python examples/11_actors.py --engine ray               on a private Ray, stopped at the end; the same code
python examples/11_actors.py --engine ray:auto          on the Ray cluster of this machine
python examples/11_actors.py --report curve.svg         where to write the picture of the learning curve

The policy learns to balance a pole on a cart (cart-pole, 200 steps at most) with policy gradients, in numpy on CPUs.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import dovetail as dt

MAX_STEPS = 200
GOAL = 190.0
ITERATIONS = 30
ROLLOUTS, EPISODES = 2, 12  # rollout workers, and episodes that each of them plays per iteration


# --- the problem and the policy: plain numpy


def play(weights, episodes, seed):
    """Play cart-pole episodes side by side: states and actions by step, and the length of each episode."""
    random = np.random.default_rng(seed)
    x, dx, angle, spin = random.uniform(-0.05, 0.05, (4, episodes))
    states, actions = [], []
    lengths, alive = np.zeros(episodes, int), np.ones(episodes, bool)
    while alive.any() and len(states) < MAX_STEPS:
        state = np.stack([x, dx, angle, spin], axis=1)
        right = probability_of_right(weights, state)[0]
        action = random.random(episodes) < right
        states.append(state)
        actions.append(action)
        lengths += alive
        push = (np.where(action, 10.0, -10.0) + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = 9.8 * np.sin(angle) - np.cos(angle) * push
        turn /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        x, dx = x + 0.02 * dx, dx + 0.02 * (push - 0.05 * turn * np.cos(angle) / 1.1)
        angle, spin = angle + 0.02 * spin, spin + 0.02 * turn
        alive &= (np.abs(x) < 2.4) & (np.abs(angle) < 0.2095)
    return np.stack(states), np.stack(actions), lengths


def probability_of_right(weights, states):
    """Probability of pushing to the right, and the hidden layer."""
    hidden = np.tanh(states * [1.0, 1.0, 10.0, 2.0] @ weights["in"] + weights["bias"])
    return 1 / (1 + np.exp(-(hidden @ weights["out"]))), hidden


# --- the roles: plain classes; `setup(worker)` gives access to the other roles


class Rollout:
    """Plays episodes with the latest weights and puts the trajectories into the pool."""

    def setup(self, worker):
        self.index, self.pool = worker.index, worker.actors.pool

    def load(self, version, weights):
        self.version, self.weights = version, weights

    def generate(self, episodes):
        states, actions, lengths = play(self.weights, episodes, seed=(self.version, self.index))
        trajectories = [
            {"version": self.version, "states": states[:steps, one], "actions": actions[:steps, one]}
            for one, steps in enumerate(lengths)
        ]
        self.pool.one.put(self.index, trajectories).result()
        return int(lengths.sum())


class TrajectoryPool:
    """Holds the trajectories of all rollout workers until the trainer takes them."""

    def __init__(self):
        self.parts = {}

    def put(self, source, trajectories):
        self.parts[source] = trajectories

    def take(self):
        parts, self.parts = self.parts, {}
        return [one for source in sorted(parts) for one in parts[source]]  # in a fixed order: results are repeatable


class Trainer:
    """Policy gradient (REINFORCE with a baseline) and Adam."""

    def __init__(self, hidden=16, rate=0.01, discount=0.99):
        random = np.random.default_rng(0)
        self.weights = {
            "in": random.normal(0, 0.3, (4, hidden)),
            "bias": np.zeros(hidden),
            "out": random.normal(0, 0.3, hidden),
        }
        self.rate, self.discount, self.version = rate, discount, 0
        self.mean = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self.square = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def setup(self, worker):
        self.pool = worker.actors.pool

    def state(self):
        return self.version, self.weights

    def step(self):
        """Train on all trajectories in the pool; returns their mean length."""
        trajectories = self.pool.one.take().result()
        assert all(one["version"] == self.version for one in trajectories), "trajectories of an older policy"
        states = np.concatenate([one["states"] for one in trajectories])
        actions = np.concatenate([one["actions"] for one in trajectories])
        returns = np.concatenate([self.discounted(len(one["actions"])) for one in trajectories])
        self.improve(states, actions, (returns - returns.mean()) / (returns.std() + 1e-8))
        return float(np.mean([len(one["actions"]) for one in trajectories]))

    def discounted(self, steps):
        """Every step that the pole stays up is worth 1: the discounted sum of the rewards that follow each step."""
        return (1 - self.discount ** np.arange(steps, 0, -1)) / (1 - self.discount)

    def improve(self, states, actions, advantage):
        right, hidden = probability_of_right(self.weights, states)
        error = advantage * (actions - right) / len(actions)
        behind = np.outer(error, self.weights["out"]) * (1 - hidden**2)
        scaled = states * [1.0, 1.0, 10.0, 2.0]
        gradients = {"in": scaled.T @ behind, "bias": behind.sum(axis=0), "out": hidden.T @ error}
        self.version += 1
        for name, gradient in gradients.items():
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * gradient
            self.square[name] = 0.99 * self.square[name] + 0.01 * gradient**2
            mean = self.mean[name] / (1 - 0.9**self.version)
            square = self.square[name] / (1 - 0.99**self.version)
            self.weights[name] = self.weights[name] + self.rate * mean / (np.sqrt(square) + 1e-8)


class WeightSync:
    """Copies the weights of the trainer to all rollout workers and the validator."""

    def setup(self, worker):
        self.actors = worker.actors

    def publish(self):
        version, weights = self.actors.trainer.one.state().result()
        loads = [self.actors.rollout.all.load(version, weights), self.actors.validator.all.load(weights)]
        for load in loads:
            load.result()
        return version


class Validator:
    """Scores the policy on episodes that are the same in every iteration."""

    def load(self, weights):
        self.weights = weights

    def score(self, episodes=30):
        return float(play(self.weights, episodes, seed=12345)[2].mean())


# --- the system: what each role needs, and what shares a process


def make_system():
    small = dt.Resources(cpus=0.25)
    train = dt.Together("train", share="max")  # one process for the three roles: they take turns
    return dt.ActorSystem(
        [
            dt.Role("trainer", Trainer, slots=1, resources=small, together=train),
            dt.Role("pool", TrajectoryPool, slots=10, resources=small, together=train),
            dt.Role("sync", WeightSync, slots=1, resources=small, together=train),
            dt.Role("rollout", Rollout, workers=ROLLOUTS, resources=small),
            dt.Role("validator", Validator, resources=small),
        ],
        name="cartpole",
    )


def learn(live):
    """The control loop: (mean length of the training episodes, score of the validator) of every iteration."""
    history = []
    for iteration in range(ITERATIONS):
        live.sync.one.publish().result()
        score = live.validator.one.score()  # at the same time as the rollouts
        live.rollout.all.generate(EPISODES).result()
        history.append((live.trainer.one.step().result(), score.result()))
        if iteration % 5 == 0 or iteration == ITERATIONS - 1:
            trained, scored = history[-1]
            print(
                f"iteration {iteration:3}  training {trained:6.1f}  validation {scored:6.1f}  {'#' * int(scored / 5)}"
            )
    return history


def draw_curve(history, path):
    """The learning curve as an SVG file."""
    width, height, left, top = 640, 320, 50, 40

    def points(column):
        across, up = width / (len(history) - 1), height / MAX_STEPS
        return " ".join(
            f"{left + i * across:.1f},{top + height - row[column] * up:.1f}" for i, row in enumerate(history)
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 80}" height="{height + 90}"',
        '     font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="16">Cart-pole: steps per episode (at most {MAX_STEPS})</text>',
    ]
    for steps in range(0, MAX_STEPS + 1, 50):
        y = top + height - steps * height / MAX_STEPS
        lines.append(f'<path d="M{left} {y} h{width}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4}" font-size="12" text-anchor="end">{steps}</text>')
    goal = top + height - GOAL * height / MAX_STEPS
    lines += [
        f'<path d="M{left} {goal} h{width}" stroke="#c33" stroke-dasharray="5 4"/>',
        f'<text x="{left + 6}" y="{goal + 14}" font-size="12" fill="#c33">goal {GOAL:.0f}</text>',
        f'<polyline points="{points(0)}" fill="none" stroke="#999" stroke-width="1.5"/>',
        f'<polyline points="{points(1)}" fill="none" stroke="#1668b0" stroke-width="2.5"/>',
        f'<text x="{left}" y="{top + height + 40}" font-size="12">iterations 0 to {len(history) - 1};'
        '<tspan fill="#1668b0"> validation</tspan><tspan fill="#777">, training</tspan></text>',
        "</svg>",
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--engine", default="local")
    options.add_argument("--report", default="learning-curve.svg")
    options = options.parse_args()

    system = make_system()
    print("--- the plan on a small machine")
    print(system.plan("1x(2cpu, 4GB)"))

    print(f"\n--- learning on {options.engine}")
    with system.launch(engine=options.engine) as live:
        began = time.perf_counter()
        history = learn(live)
        seconds = time.perf_counter() - began
        print("\n--- the system after the last iteration")
        print(live.status())

    first, best = history[0][1], max(score for _, score in history)
    print(f"\nvalidation: {first:.0f} steps at first, {history[-1][1]:.0f} at the end, in {seconds:.1f} s")
    print(f"goal of {GOAL:.0f} steps reached: {best >= GOAL and history[-1][1] >= GOAL}")
    draw_curve(history, options.report)
    print(f"learning curve: {options.report}")
