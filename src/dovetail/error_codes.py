"""Table of error codes: exit codes of the command line, cause and remedy.

`dovetail explain DT110` prints one entry; `python -m dovetail.error_codes > docs/errors.md` writes the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["ERROR_CODES", "ErrorCode", "error_codes_page"]


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One stable code."""

    code: str
    exit_codes: tuple[int, ...]
    """Exit codes of the command line; several if the error can occur both before and during a run."""
    cause: str
    remedy: str

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "exit_codes": list(self.exit_codes), "cause": self.cause, "remedy": self.remedy}

    def __str__(self) -> str:
        exits = " or ".join(map(str, self.exit_codes))
        return f"{self.code} (exit code {exits})\n  cause   {self.cause}\n  remedy  {self.remedy}"


_SEE_MESSAGE = "Apply the fix that the message shows."

_ENTRIES: tuple[tuple[str, int | tuple[int, ...], str, str], ...] = (
    # --- values
    ("DT001", 2, "A value has the wrong type.", "Write a value of the type that the message names."),
    ("DT002", 2, "A number is infinite or not a number (NaN).", "Write a finite number."),
    ("DT003", 2, "A number is negative.", "Write 0 or a positive number, or remove the setting."),
    ("DT004", 2, "A number is larger than one worker can have.", "Write a number up to the limit in the message."),
    ("DT005", 2, "A share is smaller than 0.001.", "Write 0.001 or more."),
    (
        "DT006",
        2,
        "A fraction is given where only whole units exist: 1.5 GPUs, half a codec, a part of an entire GPU.",
        "Write a whole number, or a share below 1 of a single GPU.",
    ),
    ("DT007", 2, "A size has no unit, is negative or is not a size.", "Write a size with a unit, such as 4GB."),
    ("DT008", 2, "`ranks` is not a whole number in the allowed range.", "Write a whole number from 1."),
    (
        "DT009",
        2,
        "A worker requests nothing at all, or an accelerator model without any GPU resource.",
        "Request at least a share of a CPU, or `gpus` together with `accelerator`.",
    ),
    # --- files
    (
        "DT010",
        2,
        "A file is missing, is a directory, is empty, is not UTF-8 or is not YAML.",
        "Check the path, and correct the line that the message names.",
    ),
    ("DT011", 2, "A file has an unknown key, or a call an unknown argument.", "Correct the spelling, or remove it."),
    ("DT012", 2, "A required key is missing.", "Add the key."),
    ("DT013", 2, "A value in a file has the wrong type.", "Write a value of the type that the message names."),
    (
        "DT014",
        2,
        "A file has a duplicate key, a key that is not text, or an alias that contains itself.",
        "Remove or correct the key in the line that the message names.",
    ),
    # --- clusters
    ("DT020", 2, "A cluster has no nodes.", "Describe at least one node, such as '1x(4cpu, 16GB)'."),
    ("DT021", 2, "Two nodes have the same name.", "Give every node its own name, or no name."),
    ("DT022", 2, "The share of CPUs to reserve is not between 0 and 1.", "Write a number from 0 to below 1."),
    ("DT023", 2, "A cluster description is invalid.", "Correct it at the place that the message names."),
    ("DT024", 2, "A resource request on the command line is invalid.", 'Write it as --fit "gpus=0.25, cpus=2".'),
    (
        "DT025",
        2,
        "A file cannot be written, or exists already.",
        "Choose another path, or a directory with write permission.",
    ),
    # --- pipelines
    ("DT030", 2, "A pipeline has no stages.", "Add at least one stage."),
    ("DT031", 2, "Two stages have the same name.", "Rename one of them."),
    ("DT032", 2, "A stage that is named does not exist.", "Use one of the stage names that the message lists."),
    ("DT033", 2, "The stages form a cycle.", "Remove one of the `after` entries that the message lists."),
    ("DT034", 2, "A setting of a stage has an invalid value.", _SEE_MESSAGE),
    ("DT035", 2, "A pipeline cannot be written to or read from a file.", _SEE_MESSAGE),
    ("DT036", 2, "The mode is unknown, or the headroom is out of range.", "Use a mode that the message lists."),
    ("DT037", 2, "A saved plan was made for another cluster.", "Create the plan again for this cluster."),
    ("DT038", 2, "A file is not a plan.", "Create it with `dovetail plan FILE --out plan.json`."),
    # --- feasibility
    (
        "DT101",
        3,
        "The workers together request more than is free.",
        "Request fewer workers or less per worker, run in mode sequential or waves, or add nodes.",
    ),
    (
        "DT102",
        3,
        "Each kind of worker fits, but not all at the same time.",
        "Request fewer workers, run in mode sequential or waves, or add nodes.",
    ),
    ("DT103", 3, "More workers of one kind are requested than fit.", "Request fewer workers, or add nodes."),
    (
        "DT104",
        3,
        "`workers_per_node` workers do not fit on every eligible node.",
        "Lower `workers_per_node`, or use `workers: auto`.",
    ),
    (
        "DT110",
        3,
        "One worker fits on no node now, but would fit on an empty cluster.",
        "Stop other workers, request less per worker, or add a node.",
    ),
    (
        "DT111",
        3,
        "A worker requests more GPU memory than any GPU has.",
        "Request less `gpu_memory`, or add larger GPUs.",
    ),
    (
        "DT112",
        3,
        "A worker requests NVDEC or NVENC units that no GPU of the cluster has.",
        "Request fewer, or add a GPU model that has them.",
    ),
    ("DT113", 3, "The requested accelerator is not in the cluster.", "Request one that the cluster has, or add it."),
    ("DT114", 3, "No node has the requested label.", "Correct the label, or label a node."),
    ("DT115", 3, "One worker is larger than every node.", "Request less per worker, or add a larger node."),
    (
        "DT116",
        3,
        "A gang fits neither on one node nor on a set of whole nodes.",
        "Request fewer ranks, or add nodes.",
    ),
    (
        "DT120",
        3,
        "Other runs hold the resources that this run needs, and waiting was disabled.",
        "Wait for them (leave out --no-wait), or drain one of the runs that the message names.",
    ),
    # --- ledger
    ("DT201", 1, "A seat is already taken.", "Place workers with a `Placer` instead of choosing seats by hand."),
    ("DT202", 1, "A seat is returned that was not taken.", "Return every seat exactly once."),
    ("DT203", 1, "A node is not in the cluster.", "Use one of the node names that the message lists."),
    # --- runs and folders
    ("DT301", 2, "There is no such run.", "List the runs with `dovetail ls`."),
    ("DT302", 2, "A directory is not a run directory.", "Pass the id of a run, or its directory."),
    (
        "DT303",
        2,
        "The Dovetail home or a run directory cannot be read or written.",
        "Check its permissions, or set DOVETAIL_HOME to a directory that you can write.",
    ),
    ("DT304", 2, "An abbreviated run id or name matches several runs.", "Type more characters of the id."),
    (
        "DT305",
        2,
        "A file is not a recording of a run, or has the format of another version.",
        "Record the run again with this version and `--record`.",
    ),
    ("DT306", 2, "A stage has no measured speed, or none was named.", "List them: dovetail profile ls."),
    (
        "DT307",
        2,
        "Runs cannot be removed: they are running, or it is not clear which ones are meant.",
        "Name a run that has ended, or select runs with --older-than or --keep.",
    ),
    (
        "DT308",
        2,
        "`dovetail serve` cannot listen on an address, or a request to it is invalid.",
        "Choose another port, or send a JSON value as the body of POST /.",
    ),
    ("DT310", 2, "An argument of a simulation is out of range.", _SEE_MESSAGE),
    (
        "DT320",
        2,
        "The file `ledger.db` belongs to another program or version, or is damaged.",
        "Remove it when no run is active, or set DOVETAIL_HOME to another directory.",
    ),
    (
        "DT321",
        2,
        "The ledger of this machine's runs cannot be opened, written or locked.",
        "Check the permissions of DOVETAIL_HOME, and that it is on a local disk.",
    ),
    (
        "DT330",
        1,
        "A run failed because of an item, a worker or a setup, which the message names.",
        "Correct the function and resume the run, or skip failing items with `on_error: skip`.",
    ),
    ("DT331", 2, "There is no such engine.", "Use local, ray, ray:auto or ray:HOST:PORT."),
    (
        "DT332",
        2,
        "The source is neither iterable nor a file or table, or a generator that was already used.",
        "Pass an iterable of items, a path or a pattern; call a generator function again for every run.",
    ),
    (
        "DT333",
        2,
        "The code of a stage cannot be sent to a worker, because it holds a lock, a connection or the like.",
        "Create such objects in the worker: in `setup` of a class, or inside the function.",
    ),
    (
        "DT334",
        5,
        "The local engine cannot start a process.",
        "Free memory or processes, or check the Python installation that the message names.",
    ),
    ("DT335", 1, "An item of the source cannot be sent to a worker.", "Yield plain values or picklable objects."),
    (
        "DT336",
        1,
        "Results cannot be read in the driver process.",
        "Return plain values, or objects of classes that the driver can import.",
    ),
    ("DT337", 2, "The object to run is not a pipeline.", "Pass a `dt.Pipeline`, or a file to `dovetail run`."),
    ("DT338", 2, "An argument of a run is invalid, or the plan is for another pipeline.", _SEE_MESSAGE),
    (
        "DT339",
        1,
        "Results were discarded because `wait()` was called instead of reading them.",
        "Iterate over the run, or give it a sink.",
    ),
    # --- sources
    ("DT340", 2, "A setting of a source is unknown or invalid.", _SEE_MESSAGE),
    (
        "DT341",
        2,
        "A file, directory or pattern of a source does not exist, matches nothing or is not readable.",
        "Check the path and its permissions.",
    ),
    (
        "DT342",
        2,
        "The format of source files is not clear from their names, or they have several formats.",
        "Set `format`, or read one format at a time.",
    ),
    ("DT343", 2, "A source needs a package that is not installed.", "Run the `pip install` that the message names."),
    (
        "DT344",
        1,
        "A source changed while it was read.",
        "Restore it and resume the run, or start the run again.",
    ),
    (
        "DT345",
        1,
        "A source can no longer be read: permission, damaged archive or disk error.",
        "Make it readable, then resume the run.",
    ),
    (
        "DT346",
        2,
        "A file or table does not have the format that its name or `format` specifies.",
        "Correct `format`, or the file.",
    ),
    # --- sinks
    ("DT350", 2, "The path, format or a setting of a sink is invalid.", _SEE_MESSAGE),
    (
        "DT351",
        2,
        "A sink cannot be written: wrong kind of path, no permission or no such bucket.",
        "Choose a path that you can write.",
    ),
    ("DT352", 2, "A sink exists, and `exists: fail` is set.", "Choose another path, or `exists: append`."),
    (
        "DT353",
        1,
        "There is no space for the results: disk, quota or file size limit.",
        "Free space, then resume the run.",
    ),
    (
        "DT354",
        1,
        "Results that were written are missing or truncated.",
        "Start the run again without --resume, and do not change its part files.",
    ),
    (
        "DT355",
        1,
        "Results cannot be written, for the reason in the message.",
        "Correct the cause, then resume the run.",
    ),
    (
        "DT356",
        1,
        "A column has different types in different rows, and no type holds both.",
        "Convert the column to one type in a stage.",
    ),
    (
        "DT357",
        1,
        "The file or dataset to append to was changed by another program during the run.",
        "Resume the run when no other program writes to it.",
    ),
    ("DT358", 2, "A sink needs a package that is not installed.", "Run the `pip install` that the message names."),
    ("DT359", 1, "Results cannot be uploaded.", "Check credentials and network, then resume the run."),
    # --- command line
    (
        "DT360",
        2,
        "`--set`, `--source` or `--sink` is malformed, or names something that the file does not have.",
        "Write --set PATH=VALUE, such as --set stages.caption.workers=4.",
    ),
    ("DT361", 2, "The run is no longer active.", "Use a run that `dovetail ls` lists as running."),
    (
        "DT362",
        2,
        "A run is active but cannot be reached: another machine, another user or no socket.",
        "Run the command on the machine and as the user of the run.",
    ),
    (
        "DT363",
        2,
        "The function of a source or sink failed, or a line on stdin is not JSON.",
        "Correct the function or the line that the message names.",
    ),
    ("DT364", 2, "The file to run has no source.", "Add `source:` to the file, or pass --source."),
    (
        "DT365",
        2,
        "The run to resume is a backfill, or its file is unknown.",
        "Repeat the backfill, or pass the file: dovetail run FILE --resume RUN.",
    ),
    ("DT367", 2, "Options exclude each other, or do not apply to this command.", "Leave one of them out."),
    ("DT368", 2, "The run has no such worker.", "Use one of the workers that `dovetail status RUN` lists."),
    (
        "DT369",
        1,
        "A result cannot be printed to stdout: it is not JSON, or there is no space.",
        "Return plain values from the last stage, or use --sink.",
    ),
    # --- probes
    (
        "DT370",
        3,
        "A probe needs one worker of every stage on this machine, and they do not fit.",
        "Leave out --probe, or probe on a larger machine.",
    ),
    ("DT371", 2, "Options of a probe exclude each other, or the file has no source.", _SEE_MESSAGE),
    ("DT372", 2, "The source of a probe is empty.", "Pass a source with items: --source FILE."),
    ("DT373", 1, "A probe stopped before its end.", "Run it again, or leave out --probe."),
    ("DT374", 2, "No item of a probe reached a stage.", "Probe with more items, or leave out --probe."),
    # --- serving
    (
        "DT375",
        2,
        "A pipeline cannot be served, or an argument of `dt.serve` is invalid.",
        "Serve pipelines without barriers, planned in streaming mode.",
    ),
    (
        "DT376",
        1,
        "A service accepts no more requests: it was drained, cancelled or failed.",
        "Start the service again after correcting the reason in the message.",
    ),
    ("DT377", 1, "Too many requests are pending.", "Retry later, or raise `max_pending`."),
    (
        "DT378",
        1,
        "A request failed in the stage that the message names, or its item or result cannot be sent.",
        "Correct the stage or the request.",
    ),
    ("DT379", 1, "One result was requested, and the pipeline returned several.", "Read all results of the request."),
    # --- resume
    ("DT380", 1, "The commit log of a run cannot be written.", "Free disk space, then resume the run."),
    ("DT381", 1, "The spool between two waves cannot be written.", "Free disk space, then resume the run."),
    (
        "DT382",
        2,
        "The run to resume is still active in another process, or other users can change its files.",
        "Drain it first; resume it as its owner; remove the permissions of others (`chmod go-w`).",
    ),
    ("DT383", 2, "The run cannot be resumed because it had no sink.", "Start it again with a sink."),
    ("DT384", 2, "The run to resume is already finished.", "Leave out --resume to run it again."),
    (
        "DT385",
        2,
        "A sink is neither a file nor a function, belongs to a stage that is not a leaf, or is used twice.",
        "Give every leaf stage its own sink.",
    ),
    (
        "DT386",
        2,
        "The source changed since the run started.",
        "Restore the source, pass --force-resume, or start a new run.",
    ),
    ("DT387", 2, "The run to resume started with another sink.", "Pass the same sink, or start a new run."),
    ("DT388", 2, "A run has no failed items to retry, or they cannot be retried.", _SEE_MESSAGE),
    (
        "DT389",
        2,
        "The run to resume has spooled items for stages that the pipeline no longer has.",
        "Resume with the stages as they were, or start a new run.",
    ),
    # --- Ray
    (
        "DT390",
        2,
        "A Ray engine text is malformed, or is an address of Ray Client.",
        "Use ray, ray:auto or ray:HOST:6379.",
    ),
    (
        "DT391",
        5,
        "Ray is not installed, or its version or that of Python differs from the cluster's.",
        "Install the version that the message names.",
    ),
    ("DT392", 5, "A private Ray cluster does not start on this machine.", "Read Ray's log, which the message names."),
    (
        "DT393",
        5,
        "A Ray cluster cannot be reached.",
        "Check the address, run on a node of the cluster, and set its authentication token.",
    ),
    (
        "DT394",
        5,
        "This process is attached to another Ray cluster, or was forked from one that is.",
        "Disconnect first (`ray.shutdown()`), or start a new process.",
    ),
    (
        "DT395",
        3,
        "Ray reports that it can never provide what a run needs.",
        "Start the run again; add nodes if one has left.",
    ),
    ("DT396", 3, "A run does not fit into its share of a cluster.", "Raise `share`, or request less per worker."),
    (
        "DT397",
        5,
        "Ray stopped answering, or the claims that runs of a cluster share cannot be read.",
        "Check the cluster with `ray status`, then resume the run.",
    ),
    ("DT398", 2, "A variable in `env_from` is not set in the driver.", "Set it, or remove it from `env_from`."),
    (
        "DT399",
        2,
        "A variable in `env_from` cannot be sent, because every worker has its own value for it.",
        "Remove it from `env_from`, or set it with `env` of a stage.",
    ),
    (
        "DT401",
        2,
        "A node cannot see the directory where workers write results.",
        "Use a path on storage that all nodes share.",
    ),
    ("DT402", 2, "`cluster=` was given for a run on Ray.", "Leave it out; use `share=` to limit a run."),
    (
        "DT403",
        (1, 2),
        "The `runtime_env` of a stage is invalid, or cannot be created on a node.",
        "Correct it; it cannot name a local directory.",
    ),
    (
        "DT404",
        1,
        "Dovetail does not start on any node of a Ray cluster.",
        "Install the same version of Dovetail on every node.",
    ),
    (
        "DT405",
        2,
        "Nodes of a cluster cannot see files of the source.",
        "Put the source on storage that all nodes share.",
    ),
    ("DT406", 1, "A block of a Ray Dataset cannot be read.", "Compute the dataset again, then resume the run."),
    (
        "DT407",
        2,
        "A `runtime_env` has a key that the engine of the run does not support.",
        "Remove the key, or run on Ray; for variables use `env=` of the stage.",
    ),
    # --- recipes
    (
        "DT410",
        2,
        "A recipe names an operator that does not exist, or specifies its input twice.",
        "Correct the name, or remove one of the inputs.",
    ),
    ("DT411", 2, "An operator has no such parameter.", "Correct the name of the parameter, or remove it."),
    (
        "DT412",
        2,
        "A parameter of an operator is invalid, or two parameters contradict each other.",
        "Apply the fix that the message shows.",
    ),
    ("DT413", 2, "An operator needs an extra that is not installed.", "Run the `pip install` that the message names."),
    (
        "DT414",
        2,
        "Only Data-Juicer has this operator, and the adapter cannot run it.",
        "Install Data-Juicer and set `adapter: data_juicer`, or remove the operator.",
    ),
    ("DT415", 2, "The parameters of an operator exclude each other.", "Remove one of them."),
    (
        "DT416",
        2,
        "An operator needs a field that the first rows do not have.",
        "Set the key of the field, such as `text_keys`.",
    ),
    ("DT417", 2, "A custom operator cannot be imported.", "Correct the module or the path that the message names."),
    ("DT418", 2, "A recipe has no `dataset_path`.", "Add `dataset_path`, or pass --source."),
    (
        "DT421",
        2,
        "The model of an operator is not on this machine, or is of another kind.",
        "Download the model that the message names.",
    ),
    # --- backfills
    (
        "DT430",
        2,
        "A Lance table cannot be opened.",
        "Check its path, and the storage options of its object store.",
    ),
    ("DT431", 2, "The package pylance is not installed.", "Run pip install 'dovetail-ml[lance]'."),
    ("DT432", 2, "`where` is not a valid condition for the table.", "Write an SQL condition on its columns."),
    (
        "DT433",
        (1, 2),
        "Columns of a table cannot be added, dropped or committed.",
        "Check the permissions of the store, then run the backfill again.",
    ),
    (
        "DT434",
        1,
        "Another process fills the column, and waiting was disabled; or it took the column over.",
        "Wait for it, then run the backfill again.",
    ),
    (
        "DT435",
        1,
        "A row failed, and `on_error` is `fail`.",
        "Correct the function and run the backfill again, or use `on_error: skip`.",
    ),
    ("DT436", 1, "More rows failed than `max_errors` allows.", "Correct the function, or raise `max_errors`."),
    ("DT437", 2, "An argument of a backfill is invalid.", _SEE_MESSAGE),
    (
        "DT438",
        1,
        "The table was changed repeatedly during a backfill.",
        "Run the backfill again when no other program compacts or updates the table.",
    ),
    ("DT440", 2, "An argument of `@dt.udf` is invalid, or the object is not a function.", _SEE_MESSAGE),
    (
        "DT441",
        2,
        "The signature of a function does not specify its input columns or its output type.",
        "Annotate the parameters and the return type, or set `input_columns` and `data_type`.",
    ),
    ("DT442", 2, "`on_error` or `dt.Retry` is invalid.", 'Use "fail", "skip" or dt.Retry(ConnectionError).'),
    ("DT443", 2, "A reference module:name cannot be imported.", "Correct the module or the name."),
    (
        "DT444",
        2,
        "A function reads a column that the table does not have, or the column that it fills.",
        "Rename the parameter, or set `input_columns`.",
    ),
    ("DT445", 2, "The annotation of a parameter does not match the type of its column.", "Correct the annotation."),
    (
        "DT446",
        2,
        "A function returns another number of columns, or another type, than the table needs.",
        "Correct `data_type`, or fill another column.",
    ),
    (
        "DT447",
        2,
        "The table has no such column, or no function is known for it.",
        "Correct the name, or pass the function.",
    ),
    ("DT448", 2, "The column to add already exists.", "Choose another name."),
    ("DT449", 1, "A fragment repeatedly cannot be read or written.", "Check the store, then run the backfill again."),
    (
        "DT450",
        2,
        "A column that Dovetail did not create was to be removed.",
        "Name a column that a backfill created; `dovetail backfill history TABLE` lists them.",
    ),
    (
        "DT451",
        2,
        "A column to fill has values that no backfill computed.",
        "Fill another column, or only the empty rows.",
    ),
    (
        "DT452",
        2,
        "A function that only the metadata of a table names was to be loaded.",
        "Name the function (`--udf`), or confirm the one that the table names (`--trust-table`).",
    ),
    (
        "DT453",
        2,
        "The name of a column to fill has a backtick, and Lance cannot commit such columns.",
        "Use a name without backticks, as the message shows.",
    ),
    # --- actors
    ("DT501", 2, "A role, a pool or an actor system has an invalid value.", _SEE_MESSAGE),
    ("DT502", 2, "A role names a role or a pool that does not exist.", "Use one of the names that the message lists."),
    ("DT503", 2, "Roles start after each other, or must be near each other, in a cycle.", "Remove one of the names."),
    (
        "DT504",
        2,
        "Colocated roles (`together`) have contradicting settings: counts, pools, labels, mode, or start order.",
        "Give them the same values, or remove `together` from one of them.",
    ),
    (
        "DT505",
        3,
        "Roles do not fit because of a quota of a pool, or of `together`, `spread`, `pack` or `affinity`.",
        "Request fewer workers, relax the rule, or add nodes.",
    ),
    (
        "DT506",
        2,
        "Declared calls lead back to a role that executes one call at a time: they can wait for themselves.",
        "Raise `slots` of a role in the cycle, or remove a call.",
    ),
    (
        "DT507",
        2,
        "The call pattern of a simulation names a role or method that does not exist, or lacks a service time.",
        "Correct the key `simulate` at the line that the message names.",
    ),
    (
        "DT520",
        1,
        "An instance of an actor died during a call, or is dead or stopped.",
        "`live.status()` and its log have the reason. Mark methods that may run twice with `@dt.idempotent`, and call "
        "them with `options(retries=2)`.",
    ),
    ("DT521", 1, "A call of an actor was not answered before its deadline.", "Raise the deadline, or the slots."),
    (
        "DT522",
        1,
        "An actor system did not start: an instance failed, or was not ready before the deadline. Nothing was left "
        "running.",
        "Correct the error that the message shows, or raise `deadline`.",
    ),
    ("DT523", 1, "A running actor system failed.", "Correct the error that the message shows."),
    ("DT524", 2, "A role cannot have this number of instances.", "Use a number that the message allows."),
    (
        "DT525",
        1,
        "Calls wait for each other, and all slots of their objects are taken: they would never be answered.",
        "Give one of the objects more slots, or make one of the calls without waiting for its result.",
    ),
    # --- jobs: submission
    (
        "DT601",
        2,
        "The URL or an option of a queue is invalid, or a package that it needs is not installed.",
        "Use a URL such as sqlite:///jobs.db or redis://localhost:6379/0, or install the package of the message.",
    ),
    ("DT602", 2, "An option of a job is invalid.", _SEE_MESSAGE),
    (
        "DT603",
        2,
        "A function cannot be a job: it has no name by which a worker could find it, or is not declared.",
        "Write `@dt.job` above a `def` at the top level of a module or script, and submit that.",
    ),
    (
        "DT604",
        2,
        "The arguments of a job do not fit its function, or one could also be an option of `submit`.",
        "Call it as its signature says. Pass arguments with names of options by `kwargs={...}`.",
    ),
    (
        "DT605",
        2,
        "An argument or a result of a job is not JSON.",
        "Pass what the message proposes, pass the path of a file, or open the queue with `allow_pickle=True`.",
    ),
    (
        "DT606",
        2,
        "Data of a job is pickled, which this queue or worker does not allow, or has an unknown encoding.",
        "If all submitters are trusted: `dt.Queue(url, allow_pickle=True)`.",
    ),
    (
        "DT607",
        (2, 5),
        "A file with data of a job is missing, or cannot be read or written.",
        "Open the queue and its workers with the same `files=`, a folder or URL that all machines reach.",
    ),
    (
        "DT608",
        2,
        "A worker does not run the function of a job: it is not declared with `@dt.job` in the worker's modules.",
        "Add its module to the worker with `--app`, or declare the function with `@dt.job`.",
    ),
    ("DT609", 2, "A module or script of a worker cannot be loaded, or declares no job function.", _SEE_MESSAGE),
    ("DT610", 2, "A cron expression or time zone is invalid.", "Use the expression that the message proposes."),
    ("DT611", 2, "A job depends on a job that the queue does not have.", "Submit that job first, to the same queue."),
    ("DT612", 2, "The queue does not have a job of this id.", "List the jobs with `dovetail jobs ls`."),
    (
        "DT613",
        1,
        "A job failed, was cancelled, or used up all its retries.",
        "Correct the error that the message shows, then `job.requeue()`. Its output: `job.logs()`.",
    ),
    (
        "DT614",
        1,
        "A job did not finish within the timeout of its caller. The job continues.",
        "Wait longer; the message has the reason if no worker can run the job.",
    ),
    (
        "DT615",
        2,
        "`dt.current_job()` was called outside of a job, or in a thread that a job has started.",
        "Call it in the function of the job, and pass its result to threads.",
    ),
    (
        "DT616",
        3,
        "No running worker can ever run a job: none serves its queue, or none has the resources it needs.",
        "Request less, or start a worker for the queue on a machine that has it.",
    ),
    (
        "DT617",
        2,
        "A function was submitted without a current queue.",
        "Use `with dt.Queue(url):`, `queue.use()`, the variable DOVETAIL_QUEUE, or `queue.submit(function)`.",
    ),
    (
        "DT618",
        2,
        "Data of a job is too large to be kept in the queue, and the queue has no folder for files.",
        'Open the queue and its workers with `files="/shared/folder"` or `files="s3://bucket/jobs"`.',
    ),
    ("DT619", 2, "A filter of jobs, or a limit of a queue, is invalid.", "Use a value that the message lists."),
    # --- jobs: workers
    ("DT620", 2, "An option of a worker is invalid.", _SEE_MESSAGE),
    (
        "DT621",
        2,
        "An environment variable of a worker is invalid: MAX_CONCURRENT_JOBS, USE_GPU, GPU_DEVICE, JOB_TIMEOUT or "
        "WORKER_ID.",
        "Set it to a value as in the message, or unset it.",
    ),
    (
        "DT622",
        2,
        "A worker is set to use a GPU that this machine does not have, or that is not visible.",
        "Check nvidia-smi and CUDA_VISIBLE_DEVICES, correct GPU_DEVICE, or set USE_GPU=false.",
    ),
    (
        "DT623",
        2,
        "A worker with isolation `thread` has a job timeout, which a thread cannot keep.",
        "Use isolation `process`, or unset JOB_TIMEOUT.",
    ),
    (
        "DT624",
        2,
        "A job has an isolation that does not fit: `async` for a function that is not a coroutine function, or "
        "`thread` with a timeout.",
        "Use isolation `process`, or change the function or the timeout.",
    ),
    (
        "DT625",
        2,
        "Another worker runs under the id of a worker.",
        "Unset WORKER_ID, or give every worker an id of its own.",
    ),
    (
        "DT630",
        2,
        "A request for a model is invalid: its key, size or device, or the isolation of the job (a process of its own, "
        "or an event loop, which a load would block).",
        "Use isolation `warm_process` or `thread`, and `await models.get_async(...)` in coroutines.",
    ),
    (
        "DT631",
        3,
        "There is no memory for a model: it is larger than what the worker may use, or the models of running jobs hold "
        "the memory.",
        "Release models that the job does not need any more, or start the worker with more memory.",
    ),
    (
        "DT635",
        2,
        "A worker does not run the file of a run, or does not read or write its paths: they are not in a folder of "
        "`--runs`.",
        "Start the worker with `--runs` and the folder, or move the file.",
    ),
    ("DT636", 2, "An argument of a run or backfill that is submitted as a job is invalid.", _SEE_MESSAGE),
    (
        "DT637",
        1,
        "The run of a job was drained or cancelled before its end, by another command than the job's.",
        "Resume it with `dovetail jobs requeue JOB`.",
    ),
    (
        "DT638",
        1,
        "`dovetail jobs tune` has no figures for a number of slots: all jobs failed, or the worker ended.",
        "Correct the function or its arguments. Run one job to see its output: `dovetail jobs submit ... --wait`.",
    ),
    (
        "DT640",
        2,
        "A request to the status server of a worker has an unknown path, method or job. Shown in the response only.",
        "Use a path that the response lists, with GET.",
    ),
    (
        "DT641",
        2,
        "The status server of a worker cannot listen, or would be open to other machines without a token.",
        "Set DOVETAIL_TOKEN, or use `--host 127.0.0.1` or another `--port`.",
    ),
    ("DT642", 2, "An argument of `dovetail jobs` is invalid.", _SEE_MESSAGE),
    (
        "DT643",
        2,
        "No queue is given, its SQLite file does not exist, it is in memory, or a URL is given as the name of a queue.",
        "Set DOVETAIL_QUEUE=sqlite:///jobs.db, or use `--queue-url`.",
    ),
    (
        "DT644",
        2,
        "No job, or more than one, has this text in its id.",
        "List the jobs with `dovetail jobs ls`, and use more characters of the id.",
    ),
    (
        "DT645",
        2,
        "An option `--ingest` is invalid, or there is no Redis that has its list.",
        "Write `--ingest LIST=pkg.module:function`, and `--ingest-url` if the queue is not on Redis.",
    ),
    (
        "DT646",
        2,
        "Keys of a deploy file do not fit together, or `dovetail export` was given neither a file nor `--app`.",
        "Change the file as the message says; `dovetail schema deploy` prints its JSON Schema.",
    ),
    (
        "DT647",
        2,
        "`dovetail export` would overwrite files that were edited, or that it has not written.",
        "Move the changes to the deploy file, use another folder, or overwrite them with `--force`.",
    ),
    (
        "DT650",
        2,
        "Keys of a jobs file for `dovetail simulate` do not fit together, or a file of arrivals or times is invalid.",
        "Change the file as the message says; `dovetail schema jobs` prints its JSON Schema.",
    ),
    (
        "DT660",
        5,
        "The job store cannot be used now: its disk or memory is full, another process holds its lock, or it cannot be "
        "reached.",
        "Do what the message says, and repeat the operation: it can be repeated without harm.",
    ),
    (
        "DT661",
        2,
        "The job store was written by another version of Dovetail, or belongs to another program.",
        "Upgrade Dovetail, or name another store.",
    ),
    ("DT662", 2, "The path of a job store cannot be used.", "Correct the path or its permissions as the message says."),
    (
        "DT663",
        2,
        "The file of a job store is damaged.",
        "Stop all workers and restore a backup, or move the file away to start with an empty store.",
    ),
    (
        "DT665",
        2,
        "A Redis server cannot keep jobs: it is older than Redis 7, part of a cluster, or deletes keys when its memory "
        "is full.",
        "Use another server, or correct its configuration as the message says.",
    ),
    (
        "DT666",
        2,
        "The URL or prefix of a Redis store is invalid, or the server refuses its user name, password or permissions.",
        "Correct the URL, or the user's permissions.",
    ),
    (
        "DT667",
        2,
        "The package redis, which a queue on Redis needs, is not installed.",
        "Run the `pip install` that the message names.",
    ),
)

ERROR_CODES: dict[str, ErrorCode] = {
    code: ErrorCode(code, exits if isinstance(exits, tuple) else (exits,), cause, remedy)
    for code, exits, cause, remedy in _ENTRIES
}


def error_codes_page() -> str:
    """The page docs/errors.md."""
    lines = [
        "# Error codes",
        "",
        "Codes are stable, so tools can depend on them. An error message shows what happened, the numbers behind it",
        "and fixes. `dovetail explain DT110` prints one entry of this table. For errors of Ray see also",
        "[ray.md](ray.md#troubleshooting).",
        "",
        "This page is generated: `python -m dovetail.error_codes > docs/errors.md`.",
        "",
        "| code | exit code | cause | remedy |",
        "|---|---|---|---|",
    ]
    for entry in ERROR_CODES.values():
        exits = " or ".join(map(str, entry.exit_codes))
        lines.append(f"| {entry.code} | {exits} | {entry.cause} | {entry.remedy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(error_codes_page())
