"""Data sets and their division among clients and server: NumPy arrays on the host."""

from fedjax_het.data.client_tests import (
    compute_client_mixtures,
    draw_local_tests,
    get_client_groups,
    make_client_tests,
    make_domain_tests,
    make_full_tests,
    make_proportional_tests,
    make_user_tests,
)
from fedjax_het.data.dataset import Dataset, dataset_from_arrays
from fedjax_het.data.dataset_registry import DATASETS, DatasetSpec, load_dataset, register_dataset
from fedjax_het.data.image_folder import load_image_folder
from fedjax_het.data.mean_blocks import MeanBlocks, average_examples
from fedjax_het.data.normalization import NORMALIZATIONS
from fedjax_het.data.object_dataset import dataset_from_object
from fedjax_het.data.partition import (
    Partition,
    PartitionSummary,
    make_partition,
    partition_from_clients,
)
from fedjax_het.data.partition_schemes import (
    PARTITIONS,
    PartitionScheme,
    find_parameter_name,
    register_partition,
)
from fedjax_het.data.server_data import (
    ServerData,
    ServerSummary,
    draw_withheld_examples,
    make_server_data,
    make_server_pool,
    resolve_server_options,
)
from fedjax_het.data.server_sources import SERVER_SOURCES, ServerSource, register_server_source

__all__ = [
    "DATASETS",
    "NORMALIZATIONS",
    "PARTITIONS",
    "SERVER_SOURCES",
    "Dataset",
    "DatasetSpec",
    "MeanBlocks",
    "Partition",
    "PartitionScheme",
    "PartitionSummary",
    "ServerData",
    "ServerSource",
    "ServerSummary",
    "average_examples",
    "compute_client_mixtures",
    "dataset_from_arrays",
    "dataset_from_object",
    "draw_local_tests",
    "draw_withheld_examples",
    "find_parameter_name",
    "get_client_groups",
    "load_dataset",
    "load_image_folder",
    "make_client_tests",
    "make_domain_tests",
    "make_full_tests",
    "make_partition",
    "make_proportional_tests",
    "make_server_data",
    "make_server_pool",
    "make_user_tests",
    "partition_from_clients",
    "register_dataset",
    "register_partition",
    "register_server_source",
    "resolve_server_options",
]
