"""The notebook and the solutions that ``dslib new`` writes, a cell after each line ``# %% KIND ID``.

KIND is ``markdown``, ``code``, or the tag of a cell of code. NUMBER, TOPIC, STEM and TITLE stand for those of the
new notebook.
"""

NOTEBOOK = r'''
# %% markdown title
# TITLE: what does momentum save?

A narrow valley is slow to walk down: the step must be small enough for the steep walls, and then the gentle
floor takes for ever. Momentum remembers where it was going. In a few seconds you will write both, count
their steps on valleys of the same shape, and hold the factor against the one that the analysis promises.

*Made by `dslib new`: an example of every part that a notebook has. Change it into yours.*

Source: Sutskever et al. (2013), *On the importance of initialization and momentum in deep learning*, ICML,
§2.

# %% parameters parameters
profile = "quick"  # "smoke": every path · "quick" · "full": more seeds
seed = 0
condition = 100.0  # steepest over gentlest curvature

# %% exercise-setup imports
import math

import matplotlib.pyplot as plt
import torch

from dslib import notebook as nb
from dslib.experiments import TOPIC as study
from dslib.suite import report

nb.setup(profile=profile, seed=seed)

# %% code sizes
SIZES = {  # problems, condition numbers of the figure
    "smoke": (2, [2.0, condition]),
    "quick": (5, [2.0, 4.0, 10.0, 30.0, condition, 300.0]),
    "full": (20, [2.0, 4.0, 10.0, 30.0, condition, 300.0, 1000.0]),
}
repetitions, conditions = nb.sizes(SIZES, profile)
seeds = range(seed, seed + repetitions)

# %% markdown idea-text
## 1 · A velocity

$$v_{t+1} = \mu v_t - \varepsilon \nabla f(x_t), \qquad x_{t+1} = x_t + v_{t+1}
\qquad \text{(Sutskever et al., eqs. 1 and 2)}$$

With $\mu = 0$ this is gradient descent. On $f(x) = \frac12 \sum_i \lambda_i x_i^2$ the gradient is
$\lambda_i x_i$, and the *condition number* $R$ is the largest $\lambda$ over the smallest.

# %% code idea
def descend_by_hand(eigenvalues, x, lr, momentum, steps):
    velocity = torch.zeros_like(x)
    distances = [x.norm()]
    for _ in range(steps):
        gradient = eigenvalues * x
        velocity = momentum * velocity - lr * gradient
        x = x + velocity
        distances.append(x.norm())
    return torch.stack(distances) / distances[0]


problem = study.Quadratic(condition)
runs = {}
for name, momentum in (("gradient descent", False), ("momentum", True)):
    settings = study.best_settings(condition, momentum)
    runs[name] = descend_by_hand(*problem.draw(seed), *settings, steps=200)

# %% code idea-agrees
for name, momentum in (("gradient descent", False), ("momentum", True)):
    settings = study.best_settings(condition, momentum)
    library = study.distances(*problem.draw(seed), *settings, steps=200)
    torch.testing.assert_close(runs[name].tolist(), library)

# %% code figure-run
fig, ax = plt.subplots()
for name, color in (("gradient descent", "adamw"), ("momentum", "muon")):
    ax.semilogy(runs[name], color=nb.COLOURS[color], label=name)
ax.set(xlabel="step", ylabel="distance to the minimum / at the start")
ax.legend()
nb.badge(fig, "live")
plt.show()

# %% code say-run
nb.say(
    "200 steps leave {plain:.0e} of the way, with momentum {fast:.0e}.",
    plain=runs["gradient descent"][-1],
    fast=runs["momentum"][-1],
)

# %% markdown measure-text
## 2 · How much it saves

The paper says $\sqrt R$ times fewer steps. One sample for each starting point; both at the settings that
are the best for them. The null takes away what should matter, the narrow valley: at a condition number of
1.5 there is next to nothing to save.

# %% code measure
def ratios(condition):
    quadratic = study.Quadratic(condition)
    return [study.ratio(quadratic, each) for each in seeds]


measured = {each: ratios(each) for each in sorted(set(conditions))}

# %% code figure-ratio
fig, ax = plt.subplots()
R = list(measured)
by_start = list(zip(*measured.values(), strict=True))
nb.band(ax, R, by_start, "measured", nb.colours.muon)
roots = [1 / math.sqrt(each) for each in R]
ax.plot(R, roots, ":", color=nb.colours.reference, label="1 / √R")
ax.set(xscale="log", yscale="log")
ax.set(xlabel="condition number R", ylabel="steps with momentum / without")
ax.legend()
nb.badge(fig, "live")
plt.show()

# %% code say-ratio
nb.say(
    "At R = {R:.0f} the share is {share:.2f}; 1/√R is {root:.2f}.",
    R=condition,
    share=sum(measured[condition]) / repetitions,
    root=1 / math.sqrt(condition),
)

# %% code claim
share = measured[condition]
report("TOPIC.fewer_steps", share, null=ratios(1.5))
scaled = [each * math.sqrt(condition) for each in share]
report("TOPIC.factor_is_root", scaled);

# %% markdown panel-text
**Turn the knob.** Start at $\mu = 0$ and raise it. Where does the curve fall fastest, and what does it
begin to do beyond?

# %% code panel
def panel(momentum):
    lr, _ = study.best_settings(condition, True)
    problem = study.Quadratic(condition)
    curve = study.distances(*problem.draw(seed), lr / 2, momentum, 150)
    fig, ax = plt.subplots(figsize=(6.4, 2.8))
    ax.semilogy(curve, color=nb.colours.muon)
    ax.set(xlabel="step", ylabel="distance", ylim=(1e-8, 2))
    nb.badge(fig, "live")
    plt.show()


nb.interact(panel, momentum=(0.0, 0.95, 0.05, 0.0));

# %% markdown exercise
## Exercise

**1.** *(easy, 5 minutes)* Nesterov's momentum takes the gradient where the velocity is about to lead:
$v_{t+1} = \mu v_t - \varepsilon \nabla f(x_t + \mu v_t)$ (eq. 3). Write one step of it. *Hint: the gradient
at y is `eigenvalues * y`.* Solution: `notebooks/solutions/STEM.ipynb`.

# %% exercise-stub stub-1
def nesterov_step(eigenvalues, x, velocity, lr, momentum):
    """The next x and the next velocity."""
    raise NotImplementedError

# %% exercise-check check-1
with nb.attempt("1"):
    x, velocity = nesterov_step(1.0, 1.0, 0.0, lr=0.1, momentum=0.5)
    assert math.isclose(x, 0.9)  # without a velocity it is plain descent
    x, velocity = nesterov_step(1.0, x, velocity, lr=0.1, momentum=0.5)
    assert math.isclose(x, 0.765)
    assert math.isclose(velocity, -0.135)

# %% markdown end
## What did not reproduce, and where to read on

- **The factor is not quite $\sqrt R$.** That is the ratio of the two rates in the limit. To a millionth of
  the distance momentum needs somewhat more, as it first has to build up its velocity; the figure shows the
  gap at every $R$.
- A quadratic knows no noise. With gradients from batches the best momentum is another one.

Read on: Sutskever et al. (2013), §2 to 4; Goh (2017), [*Why momentum really
works*](https://distill.pub/2017/momentum/).
'''

SOLUTIONS = r"""
# %% markdown title
# Solutions: TITLE

Solutions to the exercises of `STEM.ipynb`. The tests run them against the checks of that notebook.

# %% markdown solution-1-text
**1.** The look-ahead is $x + \mu v$.

# %% solution solution-1
def nesterov_step(eigenvalues, x, velocity, lr, momentum):
    ahead = x + momentum * velocity
    velocity = momentum * velocity - lr * eigenvalues * ahead
    return x + velocity, velocity
"""
