//! Running the command, and models to run it on. **unsafe**: a signal is reset in the child.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use forebay_format::hex;
use forebay_format::safetensors::{TensorSpec, layout};
use forebay_tensor::Dtype;
use rustix::fs::Advice;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The command, with none of its variables set.
pub(crate) fn forebay() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FOREBAY_") {
            command.env_remove(name);
        }
    }
    // SAFETY: signal(2) may be called between fork and exec. Whoever runs the tests in the background of a shell has it
    // ignored, which children inherit.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    command
}

/// Runs the command with these arguments.
pub(crate) fn run(args: &[&str]) -> Output {
    forebay().args(args).output().unwrap()
}

/// Runs a command that must succeed, and reads its stdout as JSON.
pub(crate) fn json_of(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs `load --device host --digest --json MODEL` with more arguments.
pub(crate) fn load(model: &Path, args: &[&str]) -> Value {
    json_of(
        forebay().args(["load", "--device", "host", "--digest", "--json"]).args(args).arg(model),
    )
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes that repeat nowhere near.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bytes.extend_from_slice(&(state >> 16).to_le_bytes()[..4]);
    }
    bytes.truncate(len);
    bytes
}

/// A tensor of bytes to be written.
pub(crate) struct Bytes {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn bytes(name: &str, shape: &[u64], seed: u64) -> Bytes {
    let len = shape.iter().product::<u64>() as usize;
    Bytes { name: name.to_owned(), shape: shape.to_vec(), data: noise(len, seed) }
}

/// Writes a safetensors file of U8 tensors, durable, so that it can be dropped from the page cache.
pub(crate) fn write(path: &Path, tensors: &[Bytes], metadata: &[(&str, &str)]) {
    let specs: Vec<_> = tensors
        .iter()
        .map(|tensor| TensorSpec {
            name: tensor.name.clone(),
            dtype: Dtype::U8,
            shape: tensor.shape.clone(),
        })
        .collect();
    let pairs: Vec<_> =
        metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let layout = layout(&specs, Some(&pairs)).unwrap();
    let mut content = vec![0; layout.total as usize];
    content[..layout.header.len()].copy_from_slice(&layout.header);
    for (tensor, &offset) in tensors.iter().zip(&layout.offsets) {
        content[offset as usize..][..tensor.data.len()].copy_from_slice(&tensor.data);
    }
    std::fs::write(path, content).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

/// Drops a file from the page cache; whether it is gone then.
pub(crate) fn drop_pages(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    for _ in 0..20 {
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let len = file.metadata().unwrap().len();
        let found = forebay_topology::residency::probe(&file, 0, len).unwrap();
        if found.resident_pages == 0 && found.method != forebay_topology::Method::Unknown {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    false
}

/// A folder that others may enter, with the command in it for those who cannot reach the build folder.
pub(crate) fn open_folder() -> (tempfile::TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let all = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(folder.path(), all(0o755)).unwrap();
    let command = folder.path().join("forebay");
    std::fs::copy(env!("CARGO_BIN_EXE_forebay"), &command).unwrap();
    std::fs::set_permissions(&command, all(0o755)).unwrap();
    (folder, command)
}

/// Says why a test does nothing here.
pub(crate) fn skip(why: &str) {
    eprintln!("SKIPPED: {why}");
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Digests that a load reports, by name.
pub(crate) fn arrived(report: &Value) -> Vec<(String, String)> {
    let field = |tensor: &Value, key: &str| tensor[key].as_str().unwrap().to_owned();
    let tensors = report["arrived"].as_array().unwrap();
    let mut tensors: Vec<_> =
        tensors.iter().map(|tensor| (field(tensor, "name"), field(tensor, "sha256"))).collect();
    tensors.sort();
    tensors
}

/// What [`arrived`] must give for these tensors.
pub(crate) fn expected(tensors: &[Bytes]) -> Vec<(String, String)> {
    let mut tensors: Vec<_> =
        tensors.iter().map(|tensor| (tensor.name.clone(), sha256(&tensor.data))).collect();
    tensors.sort();
    tensors
}

/// The paths that the last load of a report took.
pub(crate) fn paths(report: &Value) -> Vec<String> {
    let loads = report["loads"].as_array().unwrap();
    let paths = loads.last().unwrap()["paths"].as_array().unwrap();
    paths.iter().map(|part| part["path"].as_str().unwrap().to_owned()).collect()
}
