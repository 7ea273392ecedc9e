"""Objectives against their formulas, samplers against a network that knows the answer, noise by sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from mhla_tasks.diffusion.process import DenoisingProcess, ProcessConfig, make_process
from mhla_tasks.diffusion.sampling import DiTSamplingConfig, check_sampling, denoise, draw_samples
from scipy.stats import norm
from tiny import tiny_dit
from torch import Tensor, nn

from lightning_mhla.generative.flow import draw_flow_times
from lightning_mhla.generative.images import check_finite, to_pixels
from lightning_mhla.generative.solvers import set_steps

ALL_SAMPLERS = [
    *((ProcessConfig(learn_sigma=False), sampler) for sampler in ("ddpm", "ddim", "dpm-solver++")),
    (ProcessConfig(learn_sigma=True), "ddpm"),
    *(
        (ProcessConfig(objective="flow", shift=shift), sampler)
        for sampler in ("euler", "dpm-solver++")
        for shift in (1, 3)
    ),
]


class Oracle(nn.Module):
    """Network that predicts a single image, whose value is the label over ten."""

    channels, sides, num_classes = 1, (4, 4), 10

    def __init__(self, config: ProcessConfig) -> None:
        super().__init__()
        self.config = config
        self.kept = make_process(ProcessConfig()).alpha_bar

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        clean = (labels / 10).view(-1, 1, 1, 1).expand_as(x)
        if self.config.objective == "flow":
            return (x - clean) / (times / 1000).view(-1, 1, 1, 1)
        kept = self.kept[times].view(-1, 1, 1, 1)
        noise = (x - kept.sqrt() * clean) / (1 - kept).sqrt()
        return torch.cat([noise, torch.full_like(x, -1.0)], 1) if self.config.learns_sigma else noise


@pytest.mark.parametrize(("config", "sampler"), ALL_SAMPLERS)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_samplers_find_the_image_that_the_network_knows(config: ProcessConfig, sampler: Any, guidance: float) -> None:
    labels = torch.tensor([0, 4, 9])
    network: Any = Oracle(config)
    drawn = draw_samples(network, make_process(config), DiTSamplingConfig(sampler, 20, guidance), labels, range(3), 0)
    want = (1 + guidance * (labels / 10 - 1)).view(3, 1, 1, 1).expand(3, 1, 4, 4)  # guidance away from no class, 1.0
    torch.testing.assert_close(drawn, want, rtol=0, atol=0.02)


class Gaussian(nn.Module):
    """Network with the best prediction for normally distributed data of a given mean and deviation."""

    channels, sides, num_classes = 1, (64, 64), 10
    mean, deviation = 0.4, 0.3

    def __init__(self, config: ProcessConfig) -> None:
        super().__init__()
        self.config = config
        self.kept = make_process(ProcessConfig()).alpha_bar

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        flow = self.config.objective == "flow"
        share = times / 1000
        signal, noise = (1 - share, share) if flow else (self.kept[times].sqrt(), (1 - self.kept[times]).sqrt())
        signal, noise = signal.view(-1, 1, 1, 1), noise.view(-1, 1, 1, 1)
        away = (x - signal * self.mean) / ((signal * self.deviation) ** 2 + noise**2)
        clean, drawn = self.mean + signal * self.deviation**2 * away, noise * away
        if flow:
            return drawn - clean
        return torch.cat([drawn, torch.full_like(x, -1.0)], 1) if self.config.learns_sigma else drawn


@pytest.mark.parametrize(("config", "sampler"), ALL_SAMPLERS)
def test_samplers_draw_from_the_distribution_that_the_network_knows(config: ProcessConfig, sampler: Any) -> None:
    """The standard deviation of the samples would be wrong if a step had the wrong length."""
    network: Any = Gaussian(config)
    steps = 50 if sampler == "dpm-solver++" else 250
    drawn = draw_samples(
        network, make_process(config), DiTSamplingConfig(sampler, steps), torch.zeros(4, dtype=torch.long), range(4), 0
    )
    assert drawn.mean().item() == pytest.approx(network.mean, abs=0.02)
    assert drawn.std().item() == pytest.approx(network.deviation, rel=0.05)


@pytest.mark.parametrize(
    ("sampler", "steps"),
    [("ddim", steps) for steps in (300, 334, 499, 501, 750, 769, 998, 1000)] + [("ddpm", 334), ("dpm-solver++", 999)],
)
def test_the_distribution_is_right_for_any_number_of_steps(sampler: Any, steps: int) -> None:
    config = ProcessConfig(learn_sigma=False)
    network: Any = Gaussian(config)
    labels = torch.zeros(1, dtype=torch.long)
    drawn = draw_samples(network, make_process(config), DiTSamplingConfig(sampler, steps), labels, range(1), 0)
    assert drawn.std().item() == pytest.approx(network.deviation, rel=0.1)


def test_ddim_supports_every_number_of_steps() -> None:
    scheduler = make_process(ProcessConfig()).scheduler("ddim")
    for steps in range(1, 1001):
        set_steps(scheduler, steps)
        assert len(scheduler.timesteps) == steps
        assert (scheduler.timesteps[0], scheduler.timesteps.min() >= 0) == (999, True)
        assert (scheduler.timesteps.diff() < 0).all()


@pytest.mark.parametrize("steps", [2, 10, 250])
def test_ddim_takes_the_steps_of_diffusers_where_these_are_right(steps: int) -> None:
    config = ProcessConfig(learn_sigma=False)
    network: Any = Oracle(config)
    process, labels = make_process(config), torch.tensor([2, 7])
    theirs = DDIMScheduler(
        beta_start=1e-4, beta_end=0.02, clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
    )
    drawn = [
        denoise(network, scheduler, labels, steps, 2.0, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
        for scheduler in (process.scheduler("ddim"), theirs)
    ]
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "most", "too_many"),
    [(ProcessConfig(learn_sigma=False), 999, 1000), (ProcessConfig(objective="flow", shift=3.0), 500, 501)],
    ids=["ddpm", "flow"],
)
def test_more_steps_than_the_solver_can_take_are_an_error(config: ProcessConfig, most: int, too_many: int) -> None:
    process, network = make_process(config), Gaussian(config)
    with pytest.raises(ValueError, match=f"steps={too_many} are too many for sampler 'dpm-solver"):
        check_sampling(process, DiTSamplingConfig("dpm-solver++", too_many))
    labels, options = torch.zeros(1, dtype=torch.long), DiTSamplingConfig("dpm-solver++", most)
    drawn = draw_samples(network, process, options, labels, [0], 0)  # type: ignore[arg-type]
    assert drawn.std().item() == pytest.approx(network.deviation, rel=0.1)
    check_sampling(make_process(ProcessConfig(objective="flow")), DiTSamplingConfig("dpm-solver++", 1000))


def test_the_variational_bound_is_that_of_its_formula() -> None:
    """In float64 numpy: Gaussian divergence of the posterior, and at timestep 0 the likelihood of 8-bit pixels."""
    torch.manual_seed(0)
    process = DenoisingProcess(ProcessConfig())
    betas = np.linspace(1e-4, 0.02, 1000)
    kept = np.cumprod(1 - betas)
    before = np.append(1.0, kept[:-1])
    times = torch.tensor([0, 1, 17, 500, 999])
    clean = (torch.randint(0, 256, (5, 2, 3, 3)) / 127.5 - 1).double()
    clean[0, 0, 0, 0], clean[0, 0, 0, 1] = -1, 1
    noise, predicted, between = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3, 3), torch.rand(5, 2, 3, 3) * 2 - 1
    t = times.numpy()
    at = lambda table: table[t][:, None, None, None]  # noqa: E731
    noisy = np.sqrt(at(kept)) * clean.numpy() + np.sqrt(1 - at(kept)) * noise.numpy()
    variance = betas * (1 - before) / (1 - kept)
    variance[0] = variance[1]
    true_mean, mean = (
        at(betas * np.sqrt(before) / (1 - kept)) * x + at((1 - before) * np.sqrt(1 - betas) / (1 - kept)) * noisy
        for x in (clean.numpy(), (noisy - np.sqrt(1 - at(kept)) * predicted.numpy()) / np.sqrt(at(kept)))
    )
    share = (between.numpy() + 1) / 2
    log_variance = share * np.log(at(betas)) + (1 - share) * np.log(at(variance))
    ratio = at(variance) / np.exp(log_variance)
    divergence = 0.5 * (ratio - 1 - np.log(ratio) + (true_mean - mean) ** 2 / np.exp(log_variance))
    x, sigma = clean.numpy(), np.exp(0.5 * log_variance)
    upper = np.where(x > 0.999, 1, norm.cdf((x + 1 / 255 - mean) / sigma))
    lower = np.where(x < -0.999, 0, norm.cdf((x - 1 / 255 - mean) / sigma))
    likelihood = -np.log(np.clip(upper - lower, 1e-12, None))
    want = np.where(at(np.arange(1000)) == 0, likelihood, divergence).mean((1, 2, 3)) / math.log(2)
    found = process.variational_bound(clean.float(), torch.from_numpy(noisy).float(), predicted, between, times)
    np.testing.assert_allclose(found.numpy(), want, rtol=2e-3)


def test_the_bound_trains_the_variance_alone() -> None:
    process, network = make_process(ProcessConfig()), tiny_dit(out_channels=8)
    clean, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    times, labels = torch.tensor([0, 10, 500, 999]), torch.tensor([0, 1, 2, 10])
    process.losses(network, clean, noise, times, labels).sum().backward()
    weight = network.head.weight.grad.view(2, 2, 8, 16)  # type: ignore[union-attr]
    noisy = process.alpha_bar[times].view(4, 1, 1, 1).sqrt() * clean  # type: ignore[operator]
    noisy = noisy + (1 - process.alpha_bar[times]).view(4, 1, 1, 1).sqrt() * noise  # type: ignore[operator]
    network.zero_grad()
    predicted = network(noisy, times, labels)[:, :4]
    (predicted - noise).square().flatten(1).mean(1).sum().backward()
    alone = network.head.weight.grad.view(2, 2, 8, 16)  # type: ignore[union-attr]
    torch.testing.assert_close(weight[:, :, :4], alone[:, :, :4], rtol=1e-3, atol=1e-4)
    assert weight[:, :, 4:].abs().max() > 0


def test_the_flow_loss_is_the_velocitys() -> None:
    process, network = make_process(ProcessConfig(objective="flow")), tiny_dit()
    clean, noise, times = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.tensor([0.0, 250.0])
    labels = torch.tensor([1, 10])
    predicted = network(torch.stack([clean[0], 0.75 * clean[1] + 0.25 * noise[1]]), times, labels)
    want = (predicted - (noise - clean)).square().mean((1, 2, 3))
    torch.testing.assert_close(process.losses(network, clean, noise, times, labels), want)


def test_ddpm_250_visits_dits_timesteps() -> None:
    """Timesteps are those of respacing in DiT's code: 250 strides over 0 .. 999."""
    scheduler = make_process(ProcessConfig()).scheduler("ddpm")
    scheduler.set_timesteps(250)
    assert scheduler.timesteps.tolist() == [round(i * 999 / 249) for i in reversed(range(250))]


@pytest.mark.parametrize(
    ("process", "sampler"),
    [
        (ProcessConfig(), "ddpm"),
        (ProcessConfig(), "ddim"),
        (ProcessConfig(), "dpm-solver++"),
        (ProcessConfig(objective="flow"), "euler"),
        (ProcessConfig(objective="flow"), "dpm-solver++"),
    ],
)
def test_a_sample_does_not_depend_on_those_drawn_with_it(process: ProcessConfig, sampler: Any) -> None:
    network = tiny_dit(out_channels=8 if process.learns_sigma else 4)
    made, labels = make_process(process), torch.arange(10) % 7
    config = DiTSamplingConfig(sampler, 10, 1.5)
    together = to_pixels(draw_samples(network, made, config, labels, range(10), 3)).int()
    for rows in ([0], [9, 2], [4, 5, 6, 7]):
        alone = to_pixels(draw_samples(network, made, config, labels[rows], rows, 3)).int()
        assert (alone - together[rows]).abs().max() <= 1
    other = to_pixels(draw_samples(network, made, config, labels, range(10), 4)).int()
    assert (other - together).abs().float().mean() > 5, "the seed does nothing"


def test_labels_are_dropped_at_the_rate_asked_for() -> None:
    torch.manual_seed(0)
    labels = make_process(ProcessConfig(label_dropout=0.2)).drop_labels(torch.zeros(20_000, dtype=torch.long), 10)
    assert set(labels.tolist()) == {0, 10}
    assert (labels == 10).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_times_are_shifted_towards_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    plain, shifted, normal = (
        make_process(ProcessConfig(objective="flow", **options)).draw_times(20_000, generator, torch.device("cpu"))
        for options in ({}, {"shift": 3.0}, {"times": "logit_normal"})
    )
    for times in (plain, shifted, normal):
        assert 0 <= times.min() < times.max() <= 1000
    assert plain.mean().item() == pytest.approx(500, abs=10)
    assert shifted.median().item() == pytest.approx(750, abs=10)  # 3 u / (1 + 2 u) at u = 1/2
    assert normal.std() < plain.std() - 50


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make_process(ProcessConfig()).scheduler("euler"),
            "'euler' does not support objective 'ddpm'; use ddpm",
        ),
        (lambda: ProcessConfig(shift=3.0), "require objective: flow"),
        (lambda: ProcessConfig(label_dropout=1.0), "label_dropout=1.0"),
        (lambda: DiTSamplingConfig(steps=0), "steps=0"),
        (
            lambda: check_sampling(make_process(ProcessConfig()), DiTSamplingConfig(steps=1)),
            "'ddpm' must lie between 2 and 1,000",
        ),
        (lambda: check_sampling(make_process(ProcessConfig()), DiTSamplingConfig(steps=1001)), "between 2 and 1,000"),
        (
            lambda: check_sampling(make_process(ProcessConfig(label_dropout=0)), DiTSamplingConfig(guidance=2.0)),
            "guidance=2.0 needs a model that was also trained without labels",
        ),
        (lambda: DiTSamplingConfig(guidance=-1.0), "guidance=-1.0"),
    ],
)
def test_options_that_do_not_go_together(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_class_that_the_network_does_not_know() -> None:
    with pytest.raises(ValueError, match="class 10 is not one of 0 to 9"):
        draw_samples(tiny_dit(), make_process(ProcessConfig()), DiTSamplingConfig(), torch.tensor([10]), [0], 0)


@pytest.mark.parametrize("steps", [10, 50, 250])
def test_ddim_starts_at_the_highest_noise_and_strides_evenly(steps: int) -> None:
    scheduler = make_process(ProcessConfig()).scheduler("ddim")
    scheduler.set_timesteps(steps)
    stride = 1000 // steps
    assert scheduler.timesteps.tolist() == [999 - stride * number for number in range(steps)]


def test_variances_are_those_of_dits_code() -> None:
    """Learned, or else the large one (sigma_small=False)."""
    for learned, wanted in ((True, "learned_range"), (False, "fixed_large")):
        scheduler = make_process(ProcessConfig(learn_sigma=learned)).scheduler("ddpm")
        assert scheduler.config.variance_type == wanted


def test_under_guidance_the_variance_is_that_of_the_class() -> None:
    from mhla_tasks.diffusion.sampling import _guided

    class Known(Oracle):
        def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            return labels.float().view(-1, 1, 1, 1).expand(-1, 2, 4, 4)

    network: Any = Known(ProcessConfig())
    out = _guided(network, torch.zeros(2, 1, 4, 4), torch.zeros(2), torch.tensor([3, 7]), 2.0)
    assert out[:, 0, 0, 0].tolist() == [10 + 2 * (3 - 10), 10 + 2 * (7 - 10)]
    assert out[:, 1, 0, 0].tolist() == [3, 7]


def test_eulers_steps_are_equal() -> None:
    network: Any = Oracle(ProcessConfig(objective="flow"))
    seen: list[float] = []
    network.register_forward_pre_hook(lambda module, args: seen.append(float(args[1][0])))
    process = make_process(ProcessConfig(objective="flow"))
    draw_samples(network, process, DiTSamplingConfig("euler", 4), torch.tensor([1]), [0], 0)
    assert seen == pytest.approx([1000, 750, 500, 250], abs=1e-3)


def test_sampling_times_are_shifted_as_in_training() -> None:
    """3 s / (1 + 2 s) at s = 1, 3/4, 1/2, 1/4."""
    network: Any = Oracle(ProcessConfig(objective="flow", shift=3.0))
    seen: list[float] = []
    network.register_forward_pre_hook(lambda module, args: seen.append(float(args[1][0])))
    process = make_process(ProcessConfig(objective="flow", shift=3.0))
    draw_samples(network, process, DiTSamplingConfig("euler", 4), torch.tensor([1]), [0], 0)
    assert seen == pytest.approx([1000, 900, 750, 500], abs=1e-2)


def test_pixels_survive_the_way_to_signed_numbers_and_back() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_pixels(pixels.float() / 127.5 - 1), pixels)
    assert to_pixels(torch.tensor([-2.0, 2.0, 0.6 / 127.5 - 1])).tolist() == [0, 255, 1]
    check_finite(torch.zeros(2))
    for value in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="samples hold NaN or infinity"):
            check_finite(torch.tensor([0.0, value]))


def test_training_times_are_shifted_towards_noise() -> None:
    def times(shift: float) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        return draw_flow_times("uniform", shift, 1000, draw, torch.device("cpu"))

    share = times(1.0) / 1000
    assert 0.45 < float(share.mean()) < 0.55
    torch.testing.assert_close(times(3.0), 3000 * share / (1 + 2 * share))
