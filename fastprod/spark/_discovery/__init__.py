"""Installed as the top-level module `pyspark_fastprod`: Spark looks into modules of such names for data sources."""

from fastprod.spark.source import FastprodDataSource as DefaultSource

__all__ = ["DefaultSource"]
