"""The run's skews on the device: transformed images, and labels as the clients see them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.skews import FeatureSkew
from fedjax_het.skews.assignment import ClientSkews

Tree = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "parameters", "owners"),
    meta_fields=("skews", "ids_per_client"),
)
@dataclass(frozen=True)
class ExampleTransform:
    """Feature skews of all clients; an input of compiled programs.

    Attributes:
      skews: classes of the skews and the values that their programs depend on; static.
      key: PRNG key of the examples' draws, such as noise.
      parameters: for each skew, arrays of the clients with a leading axis K, and shared arrays.
      owners: client of each example, int32 `[N]`; None where callers always name the client.
      ids_per_client: number of ids of one client: C where ids are pairs of client and class.
    """

    skews: tuple[tuple[type[FeatureSkew], tuple[Any, ...]], ...]
    key: jax.Array
    parameters: tuple[tuple[Tree, Tree], ...]
    owners: jax.Array | None = None
    ids_per_client: int = 1

    def apply(self, images: jax.Array, positions: jax.Array, client: jax.Array) -> jax.Array:
        """Transform images of one client.

        Cost: that of the skews, in every step that reads the images; no copy of the data set.

        Args:
          images: stored images, uint8 or float32 `[B, H, W, C]`.
          positions: positions of the examples in their data set, int32 `[B]`, which determine the
            draws.
          client: id of the client, or of its pair with a class, int32 `[]`.

        Returns:
          Images, float32 `[B, H, W, C]`.
        """
        client = client // self.ids_per_client
        scale = 1 / 255 if images.dtype == jnp.uint8 else 1.0
        images = images.astype(jnp.float32) * scale
        for i, ((skew, static), (by_client, shared)) in enumerate(
            zip(self.skews, self.parameters, strict=True)
        ):
            keys = positions
            if not skew.reads_positions:
                key = jax.random.fold_in(self.key, i)
                keys = jax.vmap(partial(jax.random.fold_in, key))(positions)
            own = jax.tree.map(lambda a: a[client], by_client)
            images = skew.transform(images, own, shared, keys, *static)
        return images

    def apply_by_owner(self, images: jax.Array, positions: jax.Array) -> jax.Array:
        """Transform images of several clients, each as its owner sees it.

        Args:
          images: stored images, uint8 or float32 `[B, H, W, C]`.
          positions: positions of the examples in their data set, int32 `[B]`.

        Returns:
          Images, float32 `[B, H, W, C]`.
        """
        assert self.owners is not None, "the transform of training examples has owners"
        return self.apply_by_client(images, positions, self.owners[positions] * self.ids_per_client)

    def apply_by_client(
        self, images: jax.Array, positions: jax.Array, clients: jax.Array
    ) -> jax.Array:
        """Transform images of several clients.

        Args:
          images: stored images, uint8 or float32 `[B, H, W, C]`.
          positions: positions of the examples in their data set, int32 `[B]`.
          clients: client of each image, an id like the argument of `apply`, int32 `[B]`.

        Returns:
          Images, float32 `[B, H, W, C]`.
        """

        def apply_to_one(image, position, client):
            return self.apply(image[None], position[None], client)[0]

        return jax.vmap(apply_to_one)(images, positions, clients)


class SkewInputs(NamedTuple):
    """Inputs of a run's programs that contain its skews; None for a skew that the run lacks."""

    train_labels: Any
    "`[N]` int32: labels of the training examples as the clients see them."
    transform: ExampleTransform | None = None
    "Feature skews of training examples."
    test_transform: ExampleTransform | None = None
    "Feature skews of the clients' own tests."
    test_label_maps: Any = None
    "`[K, C]` int32: label of each class in a client's own test."


def make_skew_inputs(
    skew: ClientSkews,
    key: jax.Array,
    train_labels: Any,
    owners: Any,
    ids_per_client: int = 1,
) -> SkewInputs:
    """Return the skews of clients as programs read them.

    Args:
      skew: label skews and feature skews of the clients.
      key: PRNG key of the run's stream `SKEW`.
      train_labels: labels of the training examples as the clients see them, int32 `[N]`.
      owners: client of each training example, int32 `[N]`.
      ids_per_client: number of ids of one client in the programs, see `ExampleTransform`.

    Returns:
      The inputs.
    """
    if not skew.features:
        return SkewInputs(train_labels, test_label_maps=skew.test_label_maps)
    statics = tuple((type(feature), feature.get_static()) for feature, _ in skew.features)
    parameters = tuple(arrays for _, arrays in skew.features)
    train_key, test_key = (jax.random.fold_in(key, i) for i in range(2))
    transform = ExampleTransform(statics, train_key, parameters, owners, ids_per_client)
    of_tests = [i for i, (feature, _) in enumerate(skew.features) if feature.changes_tests]
    tests = None
    if of_tests:
        kept = (tuple(values[i] for i in of_tests) for values in (statics, parameters))
        test_statics, test_parameters = kept
        tests = ExampleTransform(test_statics, test_key, test_parameters)
    return SkewInputs(train_labels, transform, tests, skew.test_label_maps)
