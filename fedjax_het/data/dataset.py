"""Data sets in memory, and the checks of the arrays from which users build them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from fedjax_het.data.class_labels import resolve_classes
from fedjax_het.data.validation import (
    InputValidator,
    NumTokens,
    validate_domains,
    validate_input_names,
    validate_users,
    warn_about_empty_classes,
)
from fedjax_het.tasks import TASKS, Classification, TaskKind
from fedjax_het.tasks.checks import convert_labels, count_outputs, make_kind
from fedjax_het.utils.array_validation import require_below
from fedjax_het.utils.arrays import SMALLEST_DEVIATION, is_constant
from fedjax_het.utils.config import Bounds, validate, validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.former_names import (
    FORMER_ARRAY_NAMES,
    accept_former_arguments,
    accept_former_fields,
)
from fedjax_het.utils.input_kinds import (
    FrozenMapping,
    InputKind,
    InputShape,
    get_input_kind,
    map_arrays,
)
from fedjax_het.utils.io import digest_arrays
from fedjax_het.utils.memory_maps import iter_blocks
from fedjax_het.utils.text import make_html_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
else:
    ArrayLike = Any  # the function itself checks arrays, with messages of its own

# Ranges in which the inverse and the square of a normalized number are finite in float32.
_Mean = Annotated[float, Bounds(-1e30, 1e30)]
_Deviation = Annotated[float, Bounds(SMALLEST_DEVIATION, 1e30)]
_MAX_RATIO = 1e18  # of mean and deviation
# Bytes of float inputs, in memory or in a file, from which on sums are taken block by block, which
# rounds differently.
_MAX_STATISTICS_BYTES = 2**30


@accept_former_fields(FORMER_ARRAY_NAMES)
@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled examples for training and test, held on the host.

    The arrays are read-only. `load_dataset`, `load_image_folder` and `dataset_from_arrays` build a
    data set and check its arrays.

    An input of an example is an image `[H, W, C]`, a vector of features `[F]`, a series `[T, F]` of
    features, or a sequence of tokens `[T]`. A model receives `(x / 255 - mean) / std` for uint8
    images, `(x - mean) / std` for other floats, and tokens as they are. To use other constants,
    call `dataclasses.replace(dataset, mean=..., std=...)`.

    Attributes:
      name: name of the data set, shown in results.
      train_inputs: training inputs: images `[N, H, W, C]`, uint8, or float32 for a user's own float
        arrays; features `[N, F]` or series `[N, T, F]`, float32; or tokens `[N, T]`, int32.
      train_labels: training labels, int32 `[N]` in [0, num_classes).
      test_inputs: test inputs `[N_test, ...]`, of the format of `train_inputs`.
      test_labels: test labels, int32 `[N_test]` in [0, num_classes).
      num_classes: number of classes.
      mean: mean of each channel or feature, for uint8 images scaled to [0, 1], otherwise of the
        stored values; () for tokens.
      std: standard deviation of each channel or feature, in the unit of `mean`.
      class_names: name of each class, or ().
      note: facts that readers of results need, e.g. that the images were re-encoded with loss.
      train_domains: domain of each training example, int32 `[N]`, a position in `domain_names`, for
        a data set of several domains (clipart, photographs, ...). None for other data sets.
      test_domains: domain of each test example, int32 `[N_test]`, or None.
      domain_names: name of each domain, or ().
      server_inputs: inputs of the server for `server_data="user"`, in the format of `train_inputs`.
        None if the user passed none.
      server_labels: labels of `server_inputs`, int32, or None.
      is_16_bit: whether float images were uint16 images, which were divided by 65535.
      train_users: user of each training example, int64 or text `[N]`, for the partition `natural`.
        None for a data set without users.
      test_users: user of each test example, int64 or text `[N_test]`, or None.
      source: format and place from which the arrays were read, or "".
      order: order of the examples, such as "files" or "tensorflow-datasets", or "".
      num_tokens: number of different tokens, for inputs of tokens; otherwise None.
      task: kind of the task, a name in `fedjax_het.tasks.TASKS`, which decides the form of labels.
        The other attributes describe labels of "classification".
      feature_names: name of each feature, such as the columns of a table, or (). For inputs of
        several arrays, names by the name of the array.
      token_names: text of each token: words, characters or categories such as "sex=female"; or ().
        For inputs of several arrays, texts by the name of the array.
      origin: `(name, normalization)` with which `load_dataset` loaded this object. None for any
        other data set and for a changed copy. A name does not identify a part of a data set, or a
        data set with other constants.
      is_validated: whether the arrays were checked. A run checks a data set that was built by hand.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays
      >>> inputs, labels = np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 2
      >>> dataset_from_arrays(inputs, labels, inputs[:2], labels[:2], name="blank")
      Dataset('blank': 6 train and 2 test images (8, 8, 3), 2 classes)
    """

    CONSTRUCTORS: ClassVar[str] = "load_dataset, load_image_folder or dataset_from_arrays return"

    name: str
    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    note: str = ""
    train_domains: np.ndarray | None = None
    test_domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()
    server_inputs: np.ndarray | None = None
    server_labels: np.ndarray | None = None
    is_16_bit: bool = field(default=False, repr=False)
    train_users: np.ndarray | None = None
    test_users: np.ndarray | None = None
    source: str = field(default="", repr=False)
    order: str = field(default="", repr=False)
    num_tokens: int | None = None
    task: str = "classification"
    feature_names: Any = field(default=(), repr=False)
    token_names: Any = field(default=(), repr=False)
    # `dataclasses.replace` copies neither of these two.
    origin: tuple[str, str | None] | None = field(default=None, init=False, repr=False)
    is_validated: bool = field(default=False, init=False, repr=False)

    @property
    def input_shape(self) -> InputShape:
        """Shape of the input of one example, such as (H, W, C) of an image; or shapes by name."""
        shapes = map_arrays(lambda array: tuple(array.shape[1:]), self.train_inputs)
        return FrozenMapping(shapes) if isinstance(shapes, dict) else shapes

    @property
    def input_kind(self) -> InputKind:
        """Kind of the inputs: "image", "features", "series" or "tokens"."""
        return get_input_kind(self.input_shape, self.num_tokens)

    def digest(self) -> str:
        """Return the SHA-256 of the content, in hexadecimal.

        Inputs, labels, number of classes, mean, standard deviation, domains, users and the server's
        examples enter; names, the note, the source and the order's name do not. The first call
        takes about 1 s per GB of inputs; later calls return the stored digest.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        names = ["train_inputs", "train_labels", "test_inputs", "test_labels"]
        constants = {name: getattr(self, name) for name in ("num_classes", "mean", "std")}
        if self.domain_names:  # otherwise the digest equals the digest of versions without domains
            names += ["train_domains", "test_domains"]
            constants["num_domains"] = len(self.domain_names)
        if self.server_inputs is not None:
            names += ["server_inputs", "server_labels"]
        if self.num_tokens is not None:
            constants["num_tokens"] = self.num_tokens
        if self.task != "classification":
            constants["task"] = self.task
        names += [n for n in ("train_users", "test_users") if getattr(self, n) is not None]
        digest_names = {name: former_name for former_name, name in FORMER_ARRAY_NAMES.items()}
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            value = getattr(self, name)
            parts = value if isinstance(value, Mapping) else {"": value}
            # The digest contains the names of version 0.6.
            digest_name = digest_names.get(name, name)
            arrays |= {
                f"{digest_name}.{part}" if part else digest_name: a for part, a in parts.items()
            }
        constants = {n: dict(v) if isinstance(v, Mapping) else v for n, v in constants.items()}
        return digest_arrays(arrays, constants)

    def __repr__(self) -> str:
        domains = f", {len(self.domain_names)} domains" if self.domain_names else ""
        users = "" if self.train_users is None else f", {self.num_users:,} users"
        tokens = f" of {self.num_tokens:,} tokens" if isinstance(self.num_tokens, int) else ""
        return (
            f"Dataset({self.name!r}: {len(self.train_labels):,} train and {len(self.test_labels):,}"
            f" test {self._noun} {self.input_shape}{tokens}, {self._describe_labels()}{domains}"
            f"{users})"
        )

    @cached_property
    def task_kind(self) -> TaskKind:
        """The kind of the task, with the constants of the test labels."""
        return make_kind(TASKS[self.task].make, self.test_labels)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the label of one example; () for a class."""
        return tuple(self.train_labels.shape[1:])

    @property
    def label_dtype(self) -> str:
        """Type of the labels, "int32" or "float32"."""
        return str(self.train_labels.dtype)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a network, of each token for tasks with outputs per token."""
        kind = TASKS[self.task].make
        if kind.has_classes:
            return self.num_classes
        return kind.count_outputs(self.train_labels, self.num_tokens)

    @property
    def train_classes(self) -> np.ndarray:
        """Class of each training example, int32 `[N]`; 0 for a task without classes."""
        return self.get_classes(self.train_labels)

    @property
    def test_classes(self) -> np.ndarray:
        """Class of each test example, int32 `[N_test]`; 0 for a task without classes."""
        return self.get_classes(self.test_labels)

    def get_classes(self, labels: np.ndarray) -> np.ndarray:
        """Return the class of each label `[N, ...]`, int32 `[N]`; 0 for a task without classes."""
        return labels if TASKS[self.task].make.has_classes else np.zeros(len(labels), np.int32)

    @property
    def _noun(self) -> str:
        return "images" if self.input_kind == "image" else "examples"

    @property
    def num_users(self) -> int:
        """Number of users that have training examples; 0 for a data set without users."""
        return 0 if self.train_users is None else len(np.unique(self.train_users))

    def _describe_labels(self) -> str:
        if TASKS[self.task].make.has_classes:
            return f"{self.num_classes} classes"
        outputs = "output" if self.num_outputs == 1 else "outputs"
        return f"task {self.task} with {self.num_outputs:,} {outputs}"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("data set", self.name),
            (f"training {self._noun}", f"{len(self.train_labels):,}"),
            (f"test {self._noun}", f"{len(self.test_labels):,}"),
            ("kind of the inputs", self.input_kind),
            ("shape of an input", self.input_shape),
            ("labels", self._describe_labels()),
        ]
        names = self.feature_names
        features = (
            [n for part in names.values() for n in part] if isinstance(names, Mapping) else names
        )
        if features:
            rows.append(
                ("features", ", ".join([*features[:20], *(["..."] if features[20:] else [])]))
            )
        if self.domain_names:
            rows.append(("domains", ", ".join(self.domain_names)))
        if self.train_users is not None:
            rows.append(("users", f"{self.num_users:,}"))
        rows += [(fact, getattr(self, fact)) for fact in ("note", "source") if getattr(self, fact)]
        return make_html_table(rows)


@accept_former_arguments("dataset_from_arrays", FORMER_ARRAY_NAMES)
@validate_arguments
def dataset_from_arrays(
    train_inputs: ArrayLike,
    train_labels: ArrayLike,
    test_inputs: ArrayLike,
    test_labels: ArrayLike,
    *,
    name: str = "user",
    num_classes: int | None = None,
    mean: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    std: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    class_names: str | Sequence[str] = (),
    note: str = "",
    train_domains: ArrayLike | None = None,
    test_domains: ArrayLike | None = None,
    domain_names: Sequence[str] = (),
    server_inputs: ArrayLike | None = None,
    server_labels: ArrayLike | None = None,
    channels: Literal["first", "last"] | None = None,
    train_users: ArrayLike | None = None,
    test_users: ArrayLike | None = None,
    source: str = "",
    order: str = "",
    num_tokens: NumTokens | Mapping[str, int | None] | None = None,
    task: str = "classification",
    feature_names: Sequence[str] | Mapping[str, Sequence[str]] = (),
    token_names: Sequence[str] | Mapping[str, Sequence[str]] = (),
) -> Dataset:
    """Build a `Dataset` from the user's own arrays and check them.

    Arrays that already have the final dtype are not copied: do not change them afterwards.

    Args:
      train_inputs: training inputs. Images `[N, H, W, C]`: integers in 0..255 are stored as uint8;
        finite floats in [0, 1] and standardized floats are stored as float32; uint16 images with a
        pixel above 255 have 16 bits and become float32 in [0, 1], where 65535 is 1. Features
        `[N, F]` or series `[N, T, F]`: finite floats. Tokens `[N, T]`: integers in
        [0, num_tokens). Gray images `[N, H, W]`: uint8 or uint16. Several arrays of these kinds: a
        dictionary of them by name.
      train_labels: training labels: classes, integers or texts `[N]`; or the labels of `task`.
      test_inputs: test inputs `[N_test, ...]`, in the format of `train_inputs`.
      test_labels: test labels, in the form of `train_labels`.
      name: name of the data set, shown in results.
      num_classes: number of classes; labels are then positions of classes, in [0, num_classes).
        Default: the number of `class_names`. Without both, the different labels in ascending order
        are the classes: labels 1, 5 and 9 become 0, 1 and 2, and the numbers or texts are the names
        of the classes.
      mean: mean of each channel or feature (default: of the training inputs).
      std: standard deviation of each channel or feature (default: of the training inputs).
      class_names: different names of the classes; a text gives one letter to each class. Labels are
        texts among the names, positions of names, or numbers: each different number has a name.
      note: facts that readers of results need.
      train_domains: domain of each training example, integers or texts `[N]`; numbered as labels.
      test_domains: domain of each test example, integers or texts `[N_test]`. Every domain needs at
        least one test example, so that its accuracy is a number.
      domain_names: name of each domain. Default: the numbers or texts of the domains.
      server_inputs: inputs from which the server learns with `server_data="user"`, at least one, in
        the format of `train_inputs`.
      server_labels: labels of `server_inputs`, in the form of `train_labels`.
      channels: axis of the channels in all images: "first" for `[N, C, H, W]`, the layout of
        PyTorch, or "last" for `[N, H, W, C]`. Default: "last"; images of 1 to 4 rows and more than
        4 channels are then an error, since they look like `[N, C, H, W]`.
      train_users: user of each training example, integers or texts `[N]`, such as the writer of a
        character. The partition `natural` makes each user a client.
      test_users: user of each test example, integers or texts `[N_test]`. Each client's own test
        then has the test examples of its user. A user may have no test example.
      source: format and place from which the arrays were read; results record it.
      order: order of the examples, such as "files"; results record it.
      num_tokens: number of different tokens. Set it for inputs of tokens only. For inputs of
        several arrays, a dictionary with the numbers of the arrays of tokens by name.
      task: kind of the task, one of `fedjax_het.tasks.TASKS`. "multi_label": labels are zeros and
        ones `[N, L]`. "regression": labels are finite numbers `[N]` or `[N, D]`. "next_token":
        labels are integers `[N, T]`, the token after each token, or -1 where there is none.
      feature_names: name of each of the F features or columns. For inputs of several arrays, a
        dictionary of names. Saved models contain them.
      token_names: text of each token. For inputs of several arrays, a dictionary of texts. Saved
        models contain them.

    Returns:
      The data set, with read-only arrays. A warning names classes without training examples.

    Raises:
      ConfigError: if an array or a name is invalid. The message names the argument, its value and
        the expected values.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays
      >>> inputs, labels = np.full((4, 2, 2, 1), 51, np.uint8), np.array([0, 1, 0, 1])
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> dataset.num_classes, dataset.mean, dataset.std
      (2, (0.2,), (1.0,))
    """
    inputs: dict[str, Any] = {"train_inputs": train_inputs, "test_inputs": test_inputs}
    inputs["server_inputs"] = server_inputs
    validator = InputValidator.from_user(inputs, num_tokens, channels)
    tokens, is_16_bit = validator.num_tokens, validator.is_16_bit
    train = validator.validate("train_inputs", train_inputs)
    test = validator.validate("test_inputs", test_inputs, train)
    task_kind: type[TaskKind] = TASKS.require(task).make
    labels: dict[str, Any] = {"train_labels": train_labels, "test_labels": test_labels}
    if server_labels is not None:
        labels["server_labels"] = server_labels
    class_names = tuple(class_names)  # each letter of a text is a class name
    num_outputs = 1
    if task_kind.has_classes:
        labels, num_outputs, class_names = resolve_classes(labels, num_classes, class_names)
    train_labels = convert_labels(
        task_kind, "train_labels", labels["train_labels"], "train_inputs", train
    )
    test_labels = convert_labels(
        task_kind, "test_labels", labels["test_labels"], "test_inputs", test
    )
    server_examples = validate_server_examples(
        *(server_inputs, labels.get("server_labels"), train),
        validator=validator,
        task_kind=task_kind,
    )
    if task_kind.has_classes:
        warn_about_empty_classes(train_labels, num_outputs, class_names)
    else:
        expected = f"no value: labels of task {task} are no classes"
        require(num_classes in (None, 1), "num_classes", num_classes, expected)
        require(not class_names, "class_names", class_names[:10], expected)
        _require_equal_outputs(task_kind, train_labels, test_labels, tokens)

    mean, std = _validate_constants(train, mean, std)
    domains = {"train_domains": train_domains, "test_domains": test_domains}
    domain_fields = validate_domains(domains, domain_names, (train, test))
    user_fields = validate_users(
        {"train_users": train_users, "test_users": test_users}, (train, test)
    )
    arrays = (train, train_labels, test, test_labels)
    for value in (*arrays, *domain_fields[:2], *server_examples, *user_fields):
        for array in value.values() if isinstance(value, Mapping) else (value,):
            if array is not None:
                array.setflags(write=False)
    constants = (num_outputs, mean, std, class_names, note)
    groups = (*domain_fields, *server_examples, is_16_bit, *user_fields)
    names = validate_input_names(train, tokens, feature_names, token_names)
    facts = (source, order, tokens, task, *names)
    fields: list[Any] = [name, *arrays, *constants, *groups, *facts]
    dataset = Dataset(*fields)
    object.__setattr__(dataset, "is_validated", True)
    return dataset


def _require_equal_outputs(
    kind: type[TaskKind], train_labels: np.ndarray, test_labels: np.ndarray, num_tokens: int | None
) -> None:
    """Raise ConfigError unless both splits have labels for one number of outputs."""
    if kind.is_per_token:
        require(num_tokens is not None, "num_tokens", None, f"a number, for task {kind.name}")
        for name, labels in (("train_labels", train_labels), ("test_labels", test_labels)):
            allowed = f"tokens in [0, {num_tokens}), or -1 where there is none"
            require(labels.max() < num_tokens, f"range of {name}", int(labels.max()), allowed)
    expected, actual = (count_outputs(kind, v, num_tokens) for v in (train_labels, test_labels))
    require(actual == expected, "outputs of test_labels", actual, f"{expected}, as train_labels")


def validate_dataset(dataset: Any) -> Dataset:
    """Check a data set that is passed to a run.

    The arrays are checked only if the data set was built by hand.

    Args:
      dataset: the object that the user passed.

    Returns:
      The data set, with checked arrays.

    Raises:
      ConfigError: if `dataset` is not a `Dataset`, or if its arrays are invalid.
    """
    dataset = validate("dataset", dataset, Dataset)
    if dataset.is_validated:
        return dataset
    field_values = {f.name: getattr(dataset, f.name) for f in dataclasses.fields(dataset) if f.init}
    is_16_bit = field_values.pop("is_16_bit")
    validated_dataset = dataset_from_arrays(**field_values)
    if is_16_bit:  # images that were already divided
        object.__setattr__(validated_dataset, "is_16_bit", is_16_bit)
    return validated_dataset


def validate_server_examples(
    server_inputs: Any,
    server_labels: Any,
    train_inputs: Any,
    *,
    validator: "InputValidator",
    num_classes: int | None = None,
    task_kind: type[TaskKind] = Classification,
) -> tuple[Any, Any]:
    """Check the inputs and labels from which the server learns.

    Args:
      server_inputs: inputs `[M, ...]` in the format of `train_inputs`, or None.
      server_labels: labels, in the form of the training labels, or None.
      train_inputs: training inputs `[N, ...]`, already checked.
      validator: checks inputs of the kind of the training inputs.
      num_classes: number of classes. Default: the caller checks the range of the labels.
      task_kind: kind of the task.

    Returns:
      `(server_inputs, server_labels)`, with int32 labels; `(None, None)` if both are None.

    Raises:
      ConfigError: if only one of the two is None, or if an array is invalid.
    """
    if server_inputs is None and server_labels is None:
        return None, None
    for argument, values in (("server_inputs", server_inputs), ("server_labels", server_labels)):
        require(values is not None, argument, values, "an array, since the other of the two is set")
    server_inputs = validator.validate("server_inputs", server_inputs, train_inputs)
    arguments = ("server_labels", server_labels, "server_inputs", server_inputs)
    server_labels = convert_labels(task_kind, *arguments)
    if task_kind.has_classes and num_classes is not None:
        require_below("server_labels", server_labels, num_classes)
    return server_inputs, server_labels


def _validate_constants(train_inputs: Any, mean: Any, std: Any) -> tuple[Any, Any]:
    """Return the checked constants of normalization; by default the training inputs' statistics."""

    def validate_array(
        inputs: np.ndarray, mean: Any, std: Any, suffix: str = ""
    ) -> tuple[Any, Any]:
        statistics = compute_channel_statistics(inputs) if mean is None or std is None else ((), ())
        mean = validate(f"mean{suffix}", statistics[0] if mean is None else mean, tuple[_Mean, ...])
        std = validate(
            f"std{suffix}", statistics[1] if std is None else std, tuple[_Deviation, ...]
        )
        for argument, constants in ((f"mean{suffix}", mean), (f"std{suffix}", std)):
            num_channels = 0 if inputs.dtype == np.int32 else inputs.shape[-1]
            noun = "channel" if inputs.ndim == 4 else "feature"
            expected = f"{num_channels} finite numbers, one for each {noun}"
            require(len(constants) == num_channels, argument, constants, expected)
        ratios = [abs(m) / s for m, s in zip(mean, std, strict=True)]
        is_valid = max(ratios, default=0) <= _MAX_RATIO
        require(is_valid, f"std{suffix}", std, f"deviations of at least {1 / _MAX_RATIO} * |mean|")
        return mean, std

    if not isinstance(train_inputs, Mapping):
        return validate_array(train_inputs, mean, std)
    given = []
    for argument, value in (("mean", mean), ("std", std)):
        is_valid = value is None or (
            isinstance(value, Mapping) and value.keys() <= train_inputs.keys()
        )
        expected = f"constants by name: {', '.join(train_inputs)}"
        require(is_valid, argument, value, expected)
        given.append(value or {})
    pairs = {
        name: validate_array(array, given[0].get(name), given[1].get(name), f"[{name!r}]")
        for name, array in train_inputs.items()
    }
    means, deviations = (FrozenMapping({n: pair[i] for n, pair in pairs.items()}) for i in (0, 1))
    return means, deviations


def compute_channel_statistics(inputs: Any) -> tuple[Any, Any]:
    """Compute mean and standard deviation of each channel or feature.

    Exact for uint8 images, whose 256 levels are counted. A channel whose deviation is only rounding
    gets a deviation of 1.

    Args:
      inputs: arrays `[N, ..., C]`, or arrays by name; uint8 images are scaled to [0, 1].

    Returns:
      `(mean, std)`, each a tuple of C floats, or tuples by name; `((), ())` for int32 tokens.
    """
    if isinstance(inputs, Mapping):
        pairs = {name: compute_channel_statistics(array) for name, array in inputs.items()}
        by_name = [{name: pair[i] for name, pair in pairs.items()} for i in range(2)]
        return FrozenMapping(by_name[0]), FrozenMapping(by_name[1])
    means, deviations = [], []
    if inputs.dtype == np.int32:
        return (), ()
    for channel in range(inputs.shape[-1]):
        values = inputs[..., channel]
        if inputs.dtype == np.uint8:
            blocks, levels = iter_blocks(values), np.arange(256) / 255
            counts = np.sum([np.bincount(b.ravel(), minlength=256) for b in blocks], axis=0)
            mean = np.average(levels, weights=counts)
            deviation = np.sqrt(np.average((levels - mean) ** 2, weights=counts))
        elif inputs.nbytes <= _MAX_STATISTICS_BYTES:
            mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        else:
            sums = [block.sum(dtype=np.float64) for block in iter_blocks(values)]
            mean = sum(sums) / values.size
            squares = [np.square(block - mean).sum() for block in iter_blocks(values)]
            deviation = np.sqrt(sum(squares) / values.size)
        means.append(float(mean))
        deviations.append(1.0 if is_constant(mean, deviation) else float(deviation))
    return tuple(means), tuple(deviations)
