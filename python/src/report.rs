//! Reports as dictionaries.

use forebay_engine::Report;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The report of a load. docs of the keys: `forebay/_report.py`.
pub(crate) fn to_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("read_bytes", report.read_bytes)?;
    dict.set_item("seconds", report.seconds)?;
    dict.set_item("gb_per_s", report.gigabytes_per_second())?;
    dict.set_item("cpu_seconds", report.cpu_seconds)?;
    dict.set_item("threads", report.threads)?;
    let paths = PyDict::new(py);
    for share in &report.paths {
        let path = PyDict::new(py);
        path.set_item("bytes", share.bytes)?;
        path.set_item("pieces", share.pieces)?;
        path.set_item("reasons", PyList::new(py, &share.reasons)?)?;
        paths.set_item(share.path.as_str(), path)?;
    }
    dict.set_item("paths", paths)?;
    dict.set_item("verified_gpu_bytes", report.verified_gpu_bytes)?;
    dict.set_item("verified_cpu_bytes", report.verified_cpu_bytes)?;
    dict.set_item("unverified_bytes", report.unverified_bytes)?;
    dict.set_item("refusals", PyList::new(py, &report.refusals)?)?;
    dict.set_item("arena_limit_bytes", report.arena.size_bytes)?;
    dict.set_item("arena_touched_bytes", report.arena.touched_bytes)?;
    dict.set_item("arena_peak_bytes", report.arena.peak_bytes)?;
    dict.set_item("registered_peak_bytes", report.registered_peak_bytes)?;
    dict.set_item("registered_limit_bytes", report.registered_limit_bytes)?;
    dict.set_item("registered_left_bytes", report.registered_left_bytes)?;
    dict.set_item("files_unchanged", report.files_unchanged)?;
    Ok(dict)
}
