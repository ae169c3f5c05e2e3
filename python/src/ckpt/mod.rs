//! Checkpoints: what the package's `Checkpointer` and `dcp` classes are made of.
//!
//! Thin as the rest: [`agreed`] has what all ranks agreed on, [`structure`] describes what a rank writes,
//! [`pool`] is staging memory, [`saver`] starts saves and
//! [`saving`] is one under way, [`reader`] opens checkpoints, [`steps`] looks after a folder of steps.
//! [`tiers`] moves steps on. [`hints`] is a rank's end of torch's store. [`audit`] tells Python's audit hooks what is
//! about to be written. [`bequeath`] is for saves that outlive their process.
//! Flattening, agreement between ranks and everything about torch is the package's.

mod agreed;
mod audit;
mod bequeath;
mod hints;
mod pool;
mod reader;
mod saver;
mod saving;
mod steps;
mod structure;
mod tiers;

use forebay_error::{Code, Error};
use pyo3::prelude::*;

/// Adds classes and functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<agreed::SharedStructure>()?;
    module.add_class::<structure::Structure>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<hints::Hints>()?;
    module.add_class::<saver::Saver>()?;
    module.add_class::<saving::Save>()?;
    module.add_class::<reader::Checkpoint>()?;
    module.add_class::<steps::ReadLease>()?;
    module.add_class::<tiers::Tiers>()?;
    module.add_function(wrap_pyfunction!(pool::memory_headroom, module)?)?;
    module.add_function(wrap_pyfunction!(saver::commit_parts, module)?)?;
    module.add_function(wrap_pyfunction!(steps::steps, module)?)?;
    module.add_function(wrap_pyfunction!(steps::latest, module)?)?;
    module.add_function(wrap_pyfunction!(steps::prune, module)?)?;
    module.add_function(wrap_pyfunction!(steps::gc, module)?)?;
    module.add_function(wrap_pyfunction!(steps::read_lease, module)?)
}

/// A `usage` error.
fn usage(what: impl Into<String>) -> Error {
    Error::new(Code::Usage, what)
}
