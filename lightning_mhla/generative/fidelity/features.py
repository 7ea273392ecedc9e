"""Networks that compute image features for FID and related metrics: Inception-v3, digit classifiers and a random network."""

from __future__ import annotations

import pickle
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.data.digits import LOADERS, Name
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.ranges import check_range, check_seed
from lightning_mhla.system.untrusted import BROKEN, reason


class Features(NamedTuple):
    """Output of a feature network for a batch of B images, as float32 tensors.

    Attributes:
        pooled: D features of each image for FID, KID, precision and recall, ``[B, D]``.
        spatial: S features of each image for sFID, ``[B, S]``; None if the network does not compute them.
        logits: scores of K classes for the Inception Score, ``[B, K]``; None if the network does not compute them.
    """

    pooled: Tensor
    spatial: Tensor | None
    logits: Tensor | None


class FeatureNetwork:
    """Base class of frozen networks that compute features of 8-bit images for FID and related metrics.

    Attributes:
        names_labels: whether the logits are scores of the classes on which the generative model is trained. If so, the metrics
            include ``label_accuracy``, the share of generated images that the network assigns to their intended class.
    """

    names_labels = False

    def network(self) -> nn.Module:
        """Return the network that computes the features. It is created or loaded on the first call."""
        raise NotImplementedError

    def extract(self, network: nn.Module, images: Tensor) -> Features:
        """Compute the features of a batch of images.

        Args:
            network: network returned by :meth:`network`.
            images: images ``[B, C, S, S]`` uint8 with 1 or 3 channels, on the device of the network.
        """
        raise NotImplementedError


class InceptionFeatures(FeatureNetwork):
    """Inception-v3 feature network, with the weights that are commonly used for published FID values.

    The weights are torch-fidelity's port of the TensorFlow weights of 2015-12-05. Images are resized as in TensorFlow. The
    features for sFID are the first seven channels of the layer ``mixed_6/conv`` (17 x 17), as in the ADM evaluator of
    guided-diffusion. The logits are scores of 1,008 classes without the bias of the last layer, as torch-fidelity and the ADM
    evaluator use them for the Inception Score.

    Args:
        weights: path of a local file with torch-fidelity's weights; null to download them once.
    """

    def __init__(self, weights: str | None = None) -> None:
        self.weights = weights
        self._network: nn.Module | None = None

    def network(self) -> nn.Module:
        """Return the Inception-v3 network. Its weights are loaded, and downloaded if necessary, on the first call.

        Raises:
            FileNotFoundError: if the file of weights does not exist, or the download fails.
            ValueError: if the file does not contain the weights of this network, or cannot be read safely.
        """
        if self._network is None:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

            path = self._file()
            try:
                torch.load(path, weights_only=True, map_location="cpu")  # torch-fidelity's own load runs code
                names = ["2048", "logits_unbiased"]
                self._network = FeatureExtractorInceptionV3("inception-v3-compat", names, str(path))
            except (pickle.UnpicklingError, *BROKEN) as error:
                raise ValueError(
                    f"{path} holds no weights of torch-fidelity's Inception-v3 ({reason(error)})"
                ) from error
        return self._network

    def _file(self) -> Path:
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

        if self.weights is not None:
            if not Path(self.weights).is_file():
                raise FileNotFoundError(f"weights of Inception-v3: {self.weights} does not exist")
            return Path(self.weights)
        path = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rsplit("/", 1)[-1]
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(URL_INCEPTION_V3, str(path), hash_prefix="6726825d")
            except OSError as error:
                raise FileNotFoundError(
                    f"the weights of Inception-v3 cannot be downloaded ({error}); fetch {URL_INCEPTION_V3} elsewhere and "
                    "name the file: features.init_args.weights, or --weights"
                ) from error
        return path

    @override
    def extract(self, network: nn.Module, images: Tensor) -> Features:
        """Compute Inception-v3 features of a batch of images. Gray images are converted to RGB first.

        Args:
            network: network returned by :meth:`network`.
            images: images ``[B, C, S, S]`` uint8 with 1 or 3 channels, on the device of the network.
        """
        recorded: list[Tensor] = []
        branch: Any = network.get_submodule("Mixed_6d.branch1x1")
        # torch-fidelity does not return the features of sFID, so a hook collects them.
        hook = branch.register_forward_hook(lambda module, args, out: recorded.append(out[:, :7]))
        try:
            pooled, logits = network(images.expand(-1, 3, -1, -1))
        finally:
            hook.remove()
        spatial = recorded[0].permute(0, 2, 3, 1).flatten(1)  # channels last, as in TensorFlow
        return Features(pooled, spatial, logits)


class DigitNetwork(nn.Module):
    """Small convolutional classifier of handwritten digits, which also returns 64 features of each image.

    Args:
        side: height and width of the images in pixels, 8 or 28.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        stride = 1 if side == 8 else 2
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (side // stride // 2) ** 2, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features and class scores of images of handwritten digits.

        Args:
            images: images ``[B, 1, S, S]`` with values from 0 to 1.

        Returns:
            Features ``[B, 64]``, and scores of the ten digits ``[B, 10]``.
        """
        features = self.body(images)
        return features, self.head(features)


class DigitFeatures(FeatureNetwork):
    """Feature network for 8 x 8 digits: a small classifier trained on first use, on the 1,437 training digits of scikit-learn.

    Training takes seconds on a CPU. The same seed gives the same weights.

    Args:
        seed: seed of the initial weights and of the order of the digits.
        epochs: number of training epochs.

    Attributes:
        side: height and width of the digits in pixels.
        digits: name of the data set.

    Raises:
        ValueError: if ``seed`` is negative, or ``epochs`` is less than 1.
    """

    names_labels = True
    side: ClassVar[int] = 8
    digits: ClassVar[Name] = "digits"

    def __init__(self, seed: int = 0, epochs: int = 30) -> None:
        check_seed(seed=seed)
        check_range(least=1, epochs=epochs)
        self.seed, self.epochs = seed, epochs

    @override
    def network(self) -> nn.Module:
        """Return the digit classifier. The first call in each process trains it."""
        return _train_on_digits(self.digits, self.side, self.seed, self.epochs)

    @override
    def extract(self, network: nn.Module, images: Tensor) -> Features:
        size = (self.side, self.side)
        if images.shape[-2:] != size:
            name = type(self).__name__
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels; {name} supports digits of {size}")
        pooled, logits = network(images[:, :1].float() / 255)
        return Features(pooled, None, logits)


class MnistFeatures(DigitFeatures):
    """Feature network for 28 x 28 digits: a small classifier trained on first use, on 4,000 digits of MNIST.

    Training takes seconds on a CPU. The same seed gives the same weights.

    Args:
        seed: seed of the initial weights and of the order of the digits.
        epochs: number of training epochs.

    Raises:
        ValueError: if ``seed`` is negative, or ``epochs`` is less than 1.
    """

    side = 28
    digits = "mnist"

    def __init__(self, seed: int = 0, epochs: int = 12) -> None:
        super().__init__(seed, epochs)


class RandomFeatures(FeatureNetwork):
    """Convolutional feature network with random weights, which needs no download and accepts images of any size.

    The 512 features are the means and standard deviations of the last layer's channels. Distances between such features rank
    sets of images by quality and do not depend on training data (Naeem et al., arXiv 2002.09797, section 4). They cannot be
    compared with published values.

    Args:
        seed: seed of the weights, which are the same on every machine.
    """

    def __init__(self, seed: int = 0) -> None:
        check_seed(seed=seed)
        self.seed = seed

    @override
    def network(self) -> nn.Module:
        return _random_network(self.seed)

    @override
    def extract(self, network: nn.Module, images: Tensor) -> Features:
        """Compute features of a batch of images with the random network. Gray images are converted to RGB first.

        Args:
            network: network returned by :meth:`network`.
            images: images ``[B, C, S, S]`` uint8 with 1 or 3 channels, on the device of the network.
        """
        x = images.expand(-1, 3, -1, -1).float() / 127.5 - 1
        channels = network(x).flatten(2)
        return Features(torch.cat([channels.mean(-1), channels.std(-1, correction=0)], 1), None, None)


@cache
def _random_network(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    widths = (3, 32, 64, 128, 256)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        with torch.no_grad():
            convolution.weight.copy_(
                # He's initialization for ReLU: the variance of the outputs stays that of the inputs through the layers.
                torch.randn(convolution.weight.shape, generator=generator) * (2 / (9 * inputs)) ** 0.5
            )
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers).eval().requires_grad_(False)


@cache
def _train_on_digits(name: Name, side: int, seed: int, epochs: int) -> DigitNetwork:
    images, labels = LOADERS[name](True)
    # May be called in the middle of an evaluation, which runs without gradients and must not change training's random state.
    with kept_random_state(), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        network = DigitNetwork(side)
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(labels)).split(64):
                # Shifts by up to one pixel, so that features do not depend on the exact place of a digit.
                shifts = torch.randint(-1, 2, (2,)).tolist()
                scores = network(images[rows].roll(shifts, (2, 3)))[1]
                loss = F.cross_entropy(scores, labels[rows], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return network.eval().requires_grad_(False)
