"""Fill a column of a Lance table: `dt.udf`, `dt.table`."""
