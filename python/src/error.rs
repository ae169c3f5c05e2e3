//! Errors on their way to Python.

use std::error::Error as _;

use forebay_error::{Code, Error};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// What a call here can end with: an error of the crates below, or an exception that Python raised meanwhile.
pub(crate) enum Failure {
    Forebay(Error),
    Python(PyErr),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Forebay(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Forebay(error) => Python::attach(|py| to_python(py, &error)),
        }
    }
}

/// Result of what is called from Python.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A fault of Forebay's own.
pub(crate) fn internal(what: &str) -> Failure {
    let error = Error::new(Code::Internal, what);
    Failure::Forebay(error.hint("this is a fault in Forebay, please report it"))
}

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// `forebay._errors.make` decides about the class.
fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let made = MAKE
        .get_or_try_init(py, || {
            Ok::<_, PyErr>(py.import("forebay._errors")?.getattr("make")?.unbind())
        })
        .and_then(|make| {
            let hints: Vec<&str> = error.hints().iter().map(String::as_str).collect();
            let code = error.code().as_str();
            make.bind(py).call1((
                code,
                error.what(),
                error.place(),
                hints,
                causes(error),
                errno(error),
            ))
        });
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(error.render()),
    }
}

/// The texts of the causes, outermost first.
fn causes(error: &Error) -> Vec<String> {
    let mut texts = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    texts
}

/// The system's number for the error, if a system call ended in it.
fn errno(error: &Error) -> Option<i32> {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(number) =
            error.downcast_ref::<std::io::Error>().and_then(|io| io.raw_os_error())
        {
            return Some(number);
        }
        cause = error.source();
    }
    None
}
