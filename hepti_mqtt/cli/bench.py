"""`hepti bench`: experiments."""

from __future__ import annotations

import argparse

from hepti_mqtt.bench import kernel_options
from hepti_mqtt.cli import output


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti bench`."""
    experiments = sub.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT", help="what to measure")
    kernel_options.add_arguments(experiments.add_parser("kernels", help="matmuls beside NumPy, PyTorch, ONNX Runtime"))


def bench(args: argparse.Namespace) -> int:
    """Run `hepti bench`."""
    from hepti_mqtt.bench import kernel_report, kernels

    options = kernel_options.options_of(args)
    results = kernels.run(options)
    if args.json:
        figures = [figure._asdict() for figure in kernel_report.summary(results.records)]
        output.print_json({"provenance": results.provenance, "missing": results.missing, "figures": figures})
        return 0
    output.print_lines(kernel_report.markdown(results.records, results.provenance).splitlines())
    output.print_lines([f"written to {options.out}"])
    if results.missing:
        output.print_lines([f"{results.missing} cases are not measured yet; the same command goes on"])
    return 0
