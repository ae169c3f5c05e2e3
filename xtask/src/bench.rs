//! `cargo xtask bench`: loads measured beside other loaders.
//!
//! Without arguments on the host device, which every machine has, with a model of 4 GB that is made
//! once; whatever is given goes to `bench/peers/load.py` instead. Results are kept by those
//! programs, not here.

use crate::command::{cargo, command, run};
use crate::failure::Result;
use crate::python::Venv;
use crate::{heading, target_dir};

const REQUIREMENTS: &[&[&str]] = &[&["maturin>=1.9,<2", "numpy", "safetensors==0.8.0", "torch"]];

/// On the host, page cache warm; the model is made when it is not there.
const HOST: &[&str] =
    &["bench/data/host", "--make", "bench/data/host", "--gb", "4", "--device", "cpu"];

pub(crate) fn run_benches(args: &[&str]) -> Result {
    let venv = Venv::ready("bench", REQUIREMENTS)?;
    heading("build");
    run(cargo().args(["build", "--release", "--locked", "--package", "forebay"]))?;
    venv.install_forebay()?;
    heading("forebay bench load");
    run(command(target_dir().join("release/forebay")).args(["bench", "load"]))?;
    heading("beside other loaders");
    let args = if args.is_empty() { HOST } else { args };
    run(venv.python().arg("bench/peers/load.py").args(args))
}
