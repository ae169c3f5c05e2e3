//! `forebay._native`: the engine and the formats, for the Python package around them.
//!
//! Thin on purpose: models, engines, sessions, saves and digests as objects with the calls of the crates below, nothing
//! more. What a user calls, and every word about frameworks, lies in the package (`python/forebay/`).
//!
//! - Waits hold no GIL and look for signals every [`wait::POLL`], so that Ctrl-C works ([`wait`]).
//! - Errors become the package's exceptions by their code ([`error`]).
//! - Objects with threads behind them remember the process that made them. In a child of a fork they raise `forked`,
//!   and they are leaked there instead of dropped: their threads, locks and driver handles are the parent's ([`fork`]).
//! - A fork and the exit wait for what they would break ([`process`]).

mod ckpt;
mod digest;
mod engine;
mod error;
mod fork;
mod model;
mod place;
mod process;
mod report;
mod save;
mod session;
mod wait;

use forebay_error::{Category, Code};
use forebay_tensor::Dtype;
use pyo3::prelude::*;

/// Every error code and whose turn it is.
#[pyfunction]
fn codes() -> Vec<(&'static str, &'static str)> {
    let category = |code: &Code| match code.category() {
        Category::Usage => "usage",
        Category::Data => "data",
        Category::System => "system",
        Category::Internal => "internal",
    };
    Code::ALL.iter().map(|code| (code.as_str(), category(code))).collect()
}

/// Every dtype and the bits of one element.
#[pyfunction]
fn dtypes() -> Vec<(&'static str, u64)> {
    Dtype::ALL.iter().map(|dtype| (dtype.name(), dtype.bits())).collect()
}

/// Raises the error of a code: what the tests walk the codes with.
#[pyfunction]
#[pyo3(signature = (code, what, place=None, hints=Vec::new()))]
fn raise_error(
    code: &str,
    what: &str,
    place: Option<&str>,
    hints: Vec<String>,
) -> Result<(), error::Failure> {
    let code = Code::ALL.iter().find(|known| known.as_str() == code);
    let code = code.copied().unwrap_or(Code::Internal);
    let mut error = forebay_error::Error::new(code, what);
    if let Some(place) = place {
        error = error.at(place);
    }
    for hint in hints {
        error = error.hint(hint);
    }
    Err(error.into())
}

/// The module. It relies on the GIL for nothing but the order of Python's own objects, yet says that it uses it: an
/// abi3 library does not load in a free-threaded interpreter, so that has never been tested.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(codes, module)?)?;
    module.add_function(wrap_pyfunction!(dtypes, module)?)?;
    module.add_function(wrap_pyfunction!(raise_error, module)?)?;
    module.add_function(wrap_pyfunction!(process::forget_parent, module)?)?;
    module.add_function(wrap_pyfunction!(process::resume_calls, module)?)?;
    module.add_function(wrap_pyfunction!(process::wait_for_calls, module)?)?;
    module.add_function(wrap_pyfunction!(process::wait_for_engines, module)?)?;
    module.add_class::<model::Entry>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<digest::Digests>()?;
    module.add_class::<save::Save>()?;
    place::register(module)?;
    ckpt::register(module)
}
