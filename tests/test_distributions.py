"""torch.distributions on the device: samples of the CPU's dtype and shape, within the support, and of the right mean."""

import pytest
import torch
import torch.distributions as D

import tpu_lab  # noqa: F401
from tpu_lab.backend import dispatch

# An op of the device's own draws these; the others are made of them, some without a variance.
DRAWN_HERE = {"Bernoulli", "Binomial", "Dirichlet", "Exponential", "Gamma", "Geometric", "Normal", "Poisson", "Uniform"}


def made(device):
    """name -> distribution with float32 parameters on the device."""

    def t(*values):
        return torch.tensor(values, device=device)

    half, two, probs = t(0.5, 0.3), t(2.0, 3.0), t(0.2, 0.5, 0.3)
    spread = torch.tensor([[1.0, 0.2], [0.2, 2.0]], device=device)
    return {
        "Bernoulli": lambda: D.Bernoulli(half),
        "Beta": lambda: D.Beta(two, half),
        "Binomial": lambda: D.Binomial(10, half),
        "Categorical": lambda: D.Categorical(probs),
        "Cauchy": lambda: D.Cauchy(half, two),
        "Chi2": lambda: D.Chi2(two),
        "ContinuousBernoulli": lambda: D.ContinuousBernoulli(half),
        "Dirichlet": lambda: D.Dirichlet(t(2.0, 3.0, 0.5)),
        "Exponential": lambda: D.Exponential(two),
        "FisherSnedecor": lambda: D.FisherSnedecor(two, two),
        "Gamma": lambda: D.Gamma(two, half),
        "GeneralizedPareto": lambda: D.GeneralizedPareto(half, two, t(0.1, 0.2)),
        "Geometric": lambda: D.Geometric(half),
        "Gumbel": lambda: D.Gumbel(half, two),
        "HalfCauchy": lambda: D.HalfCauchy(two),
        "HalfNormal": lambda: D.HalfNormal(two),
        "Independent": lambda: D.Independent(D.Normal(half, two), 1),
        "InverseGamma": lambda: D.InverseGamma(two, two),
        "Kumaraswamy": lambda: D.Kumaraswamy(two, two),
        "Laplace": lambda: D.Laplace(half, two),
        "LKJCholesky": lambda: D.LKJCholesky(3, t(1.5)),
        "LogNormal": lambda: D.LogNormal(half, half),
        "LogisticNormal": lambda: D.LogisticNormal(half, half),
        "LowRankMultivariateNormal": lambda: D.LowRankMultivariateNormal(half, spread[:, :1], two),
        "MixtureSameFamily": lambda: D.MixtureSameFamily(D.Categorical(half), D.Normal(half, two)),
        "Multinomial": lambda: D.Multinomial(10, probs),
        "MultivariateNormal": lambda: D.MultivariateNormal(half, spread),
        "NegativeBinomial": lambda: D.NegativeBinomial(two, half),
        "Normal": lambda: D.Normal(half, two),
        "OneHotCategorical": lambda: D.OneHotCategorical(probs),
        "Pareto": lambda: D.Pareto(two, two),
        "Poisson": lambda: D.Poisson(two),
        "RelaxedBernoulli": lambda: D.RelaxedBernoulli(t(0.7), half),
        "RelaxedOneHotCategorical": lambda: D.RelaxedOneHotCategorical(t(0.7), probs),
        "StudentT": lambda: D.StudentT(two, half, two),
        "Uniform": lambda: D.Uniform(half, two),
        "VonMises": lambda: D.VonMises(half, two),
        "Weibull": lambda: D.Weibull(two, two),
        "Wishart": lambda: D.Wishart(t(3.0).squeeze(), spread),
    }


@pytest.mark.parametrize("name", list(made("cpu")))
def test_samples_are_of_the_cpus_kind_and_spread_as_they_should(name):
    torch.manual_seed(0)
    there, here = made("cpu")[name](), made("tpu")[name]()
    expected, sample = there.sample((2000,)), here.sample((2000,))
    assert (sample.device.type, sample.dtype, sample.shape) == ("tpu", expected.dtype, expected.shape)
    sample = sample.cpu()
    assert bool(there.support.check(sample).all())
    try:
        mean, variance = there.mean, there.variance
    except NotImplementedError:  # of some the moments have no closed form
        return
    if name in DRAWN_HERE:
        error = (sample.mean(0) - mean).abs() / (variance / len(sample)).sqrt()
        assert (error < 5).all(), error  # in standard errors


def test_the_table_names_every_distribution():
    """Those that stand for others are left out."""
    left_out = {"Distribution", "ExponentialFamily", "TransformedDistribution", "OneHotCategoricalStraightThrough"}
    every = {n for n in D.__all__ if isinstance(found := getattr(D, n), type) and issubclass(found, D.Distribution)}
    assert every - left_out == set(made("cpu"))


OF_A_GENERATOR = {
    "rand": lambda g: torch.rand(3, generator=g, device="tpu"),
    "randn": lambda g: torch.randn(3, generator=g, device="tpu"),
    "randint": lambda g: torch.randint(9, (3,), generator=g, device="tpu"),
    "randperm": lambda g: torch.randperm(7, generator=g, device="tpu"),
    "uniform_": lambda g: torch.empty(3, device="tpu").uniform_(generator=g),
    "normal_": lambda g: torch.empty(3, device="tpu").normal_(generator=g),
    "exponential_": lambda g: torch.empty(3, device="tpu").exponential_(generator=g),
    "geometric_": lambda g: torch.empty(3, device="tpu").geometric_(0.3, generator=g),
    "random_": lambda g: torch.empty(3, dtype=torch.long, device="tpu").random_(generator=g),
    "random_ below": lambda g: torch.empty(3, dtype=torch.long, device="tpu").random_(90, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((5,), 0.5, device="tpu"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(5, device="tpu"), 2, generator=g),
    "kaiming": lambda g: torch.nn.init.kaiming_uniform_(torch.empty(3, 4, device="tpu"), generator=g),
}


@pytest.mark.parametrize("name", OF_A_GENERATOR)
def test_a_generator_of_the_users_gives_the_same_again(name):
    """Also at the first call, when the CPU is asked whether the arguments are right."""
    dispatch.clear()  # no signature is known: as in a fresh process

    def draw():
        generator = torch.Generator().manual_seed(5)
        return OF_A_GENERATOR[name](generator).tolist(), torch.rand(1, generator=generator).item()

    assert draw() == draw()
