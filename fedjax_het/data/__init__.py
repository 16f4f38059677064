"""What is learned from: data sets and how they are split among clients. NumPy, on the host."""

from fedjax_het.data.averages import MeanBlocks, average_examples
from fedjax_het.data.bubble import plot_partition
from fedjax_het.data.client_tests import (
    client_groups,
    client_mixtures,
    domain_tests,
    local_tests,
    tests_of,
    whole_tests,
)
from fedjax_het.data.dataset import Dataset, dataset_from_arrays
from fedjax_het.data.datasets import DATASETS, DatasetEntry, load_dataset, register_dataset
from fedjax_het.data.folder import load_image_folder
from fedjax_het.data.normalisation import NORMALISATIONS
from fedjax_het.data.partition import (
    Partition,
    PartitionSummary,
    make_partition,
    partition_from_clients,
)
from fedjax_het.data.partitions import (
    PARTITIONS,
    Scheme,
    parameter_called,
    partition_parameters,
    register_partition,
)
from fedjax_het.data.server_data import (
    ServerData,
    ServerSummary,
    check_server_options,
    server_examples,
    server_pool,
    withheld_examples,
)
from fedjax_het.data.server_picture import plot_server_examples
from fedjax_het.data.server_sources import SERVER_SOURCES, ServerSource, register_server_source

__all__ = [
    "DATASETS",
    "NORMALISATIONS",
    "PARTITIONS",
    "SERVER_SOURCES",
    "Dataset",
    "DatasetEntry",
    "MeanBlocks",
    "Partition",
    "PartitionSummary",
    "Scheme",
    "ServerData",
    "ServerSource",
    "ServerSummary",
    "average_examples",
    "check_server_options",
    "client_groups",
    "client_mixtures",
    "dataset_from_arrays",
    "domain_tests",
    "load_dataset",
    "load_image_folder",
    "local_tests",
    "make_partition",
    "parameter_called",
    "partition_from_clients",
    "partition_parameters",
    "plot_partition",
    "plot_server_examples",
    "register_dataset",
    "register_partition",
    "register_server_source",
    "server_examples",
    "server_pool",
    "tests_of",
    "whole_tests",
    "withheld_examples",
]
