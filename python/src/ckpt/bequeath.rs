//! Saves from memory that outlives the process: what it takes to finish one elsewhere.

use forebay_checkpoint::save::{Bequest, Object, Request};
use forebay_error::Result;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// `(offsets, bytes, callback)`: where in the memory each tensor region that is written lies, how large it is, and who
/// is called with the bequest before the save starts.
#[derive(FromPyObject)]
pub(super) struct Bequeath(Vec<u64>, u64, Py<PyAny>);

impl Bequeath {
    /// Hands the bequest of a save over, or the words for why there is none: the save is as good without. Errors: what
    /// the callback raises.
    pub(super) fn hand_over(
        &self,
        py: Python<'_>,
        request: &Request,
        objects: &[Object],
    ) -> crate::error::Result<()> {
        let Self(offsets, bytes, callback) = self;
        let encoded: Result<Vec<u8>> =
            py.detach(|| Bequest::encode(request, objects, offsets, *bytes));
        match encoded {
            Ok(bytes) => callback.call1(py, (PyBytes::new(py, &bytes),))?,
            Err(error) => callback.call1(py, (error.render(),))?,
        };
        Ok(())
    }
}
