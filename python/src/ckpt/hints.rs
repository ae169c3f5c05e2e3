//! Hints between ranks: what the package's thread with a client of torch's store asks it, and what it answered.
//!
//! All decisions are those of `forebay_checkpoint::commit`; the thread only carries. A native thread shows in the
//! checkpoint folder that this process lives while the GIL keeps the other one from running.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_checkpoint::commit::{Answer, Board, Order, Pulse};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::saver::{root, run_id};
use super::usage;
use crate::error::Result;
use crate::fork::Own;
use crate::process::Holder;
use crate::wait::interruptible;

/// One rank's end of torch's store.
#[pyclass(frozen, weakref, module = "forebay._native")]
pub(crate) struct Hints {
    _holder: Holder,
    board: Own<Arc<Board>>,
    /// Shows that the process lives, until `close`.
    pulse: Own<Mutex<Option<Pulse>>>,
}

impl Hints {
    pub(super) fn board(&self) -> forebay_error::Result<&Arc<Board>> {
        self.board.get()
    }
}

#[pymethods]
impl Hints {
    /// `who` names every rank of the run, for people.
    #[new]
    #[pyo3(signature = (folder, *, run_id, rank, who))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        run_id: &str,
        rank: u32,
        who: Vec<String>,
    ) -> Result<Self> {
        if rank as usize >= who.len() {
            return Err(usage(format!("rank {rank} of {}", who.len())).into());
        }
        let run = self::run_id(run_id)?;
        let board = Arc::new(Board::new(rank, who));
        let own = board.clone();
        let pulse = interruptible(py, move |_| Pulse::start(root(&folder, true)?, run, own))?;
        Ok(Self {
            _holder: Holder::new(),
            board: Own::new(board, "this end of torch's store"),
            pulse: Own::new(Mutex::new(Some(pulse)), "this sign of life"),
        })
    }

    /// What to ask the store next: `(what, key, value)`, with "add" and a number, "set" and bytes, "look", "read" and a
    /// list of keys for `key`, or "remove". None after `timeout_s`.
    fn next<'py>(&self, py: Python<'py>, timeout_s: f64) -> Result<Option<Bound<'py, PyTuple>>> {
        let board = self.board.get()?;
        let time = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::ZERO);
        let Some(order) = py.detach(|| board.next(time)) else { return Ok(None) };
        let tuple = match order {
            Order::Add(key, by) => ("add", key, by).into_pyobject(py)?,
            Order::Set(key, value) => ("set", key, PyBytes::new(py, &value)).into_pyobject(py)?,
            Order::Look(key) => ("look", key, py.None()).into_pyobject(py)?,
            Order::Read(keys) => ("read", keys, py.None()).into_pyobject(py)?,
            Order::Remove(key) => ("remove", key, py.None()).into_pyobject(py)?,
        };
        Ok(Some(tuple))
    }

    /// Takes what the store answered; what makes no sense counts as no answer.
    fn answer(&self, value: &Bound<'_, PyAny>) -> Result<()> {
        self.board.get()?.answer(understood(value));
        Ok(())
    }

    /// The store is out of reach, for good.
    fn lose(&self) -> Result<()> {
        self.board.get()?.lose();
        Ok(())
    }

    /// This rank saves no more: what is left to tell is told, then there is nothing to ask.
    fn close(&self, py: Python<'_>) -> Result<()> {
        self.board.get()?.close();
        let pulse = self.pulse.get()?;
        py.detach(|| drop(pulse.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }

    /// Whether there is nothing to ask any more.
    #[getter]
    fn over(&self) -> Result<bool> {
        Ok(self.board.get()?.is_over())
    }
}

fn understood(value: &Bound<'_, PyAny>) -> Answer {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Answer::Value(Some(bytes.as_bytes().to_vec()));
    }
    if let Ok(list) = value.cast::<PyList>() {
        let bytes = |one: Bound<'_, PyAny>| Some(one.cast::<PyBytes>().ok()?.as_bytes().to_vec());
        return list.iter().map(bytes).collect::<Option<_>>().map_or(Answer::Done, Answer::Values);
    }
    value.extract().map_or(Answer::Done, Answer::Number)
}
