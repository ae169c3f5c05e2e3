//! How tests start a program under the simulated driver: included by path, since a C library is nobody's dependency.
//!
//! The library is found where Cargo puts it, two folders above a test program (`target/debug/deps`), or where
//! `FOREBAY_SIMGPU` says. A missing one, or one older than its source, fails the test: a test that is skipped because
//! nobody built the simulator would be skipped for ever.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// A folder that holds the simulator under the driver's name.
pub(crate) struct Simulator {
    folder: tempfile::TempDir,
}

impl Simulator {
    pub(crate) fn find() -> Self {
        let library = library();
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&library, folder.path().join("libcuda.so.1")).unwrap();
        Self { folder }
    }

    /// A driver that lacks these functions: a copy of the library in which their names are others.
    #[allow(dead_code, reason = "not every program that includes this file needs it")]
    pub(crate) fn without(symbols: &[&str]) -> Self {
        let mut bytes = std::fs::read(library()).unwrap();
        for symbol in symbols {
            // As it stands in the table of names. Whoever looks it up finds its place, and another name there.
            let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
            let places: Vec<_> = (0..bytes.len() - name.len())
                .filter(|&at| bytes[at..].starts_with(&name))
                .collect();
            assert!(!places.is_empty(), "the simulator has no {symbol}");
            places.iter().for_each(|at| bytes[at + 1] = b'x');
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libcuda.so.1"), bytes).unwrap();
        Self { folder }
    }

    /// Makes `command` find the simulator, with these settings and no others.
    pub(crate) fn apply<'a>(
        &self,
        command: &'a mut Command,
        settings: &[(&str, &str)],
    ) -> &'a mut Command {
        for (name, _) in std::env::vars_os() {
            // The seed passes, so that a failure can be repeated.
            if name.to_string_lossy().starts_with("SIMGPU_") && name != "SIMGPU_SEED" {
                command.env_remove(name);
            }
        }
        let mut folders = self.folder.path().as_os_str().to_owned();
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
            folders.push(":");
            folders.push(others);
        }
        command.env("LD_LIBRARY_PATH", folders).envs(settings.iter().copied())
    }
}

fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("FOREBAY_SIMGPU") {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "FOREBAY_SIMGPU={} is no file", path.display());
        return std::path::absolute(path).unwrap();
    }
    let program = std::env::current_exe().unwrap();
    let path = program.parent().and_then(Path::parent).unwrap().join("libforebay_simgpu.so");
    let how = "build it: `cargo build -p forebay-simgpu` (with --release where the tests have it); \
               `cargo xtask test` does. Or name it in FOREBAY_SIMGPU";
    let Some(built) = modified(&path) else { panic!("no {}; {how}", path.display()) };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../forebay-simgpu/src");
    // The tests are no part of the library.
    let files = std::fs::read_dir(source).into_iter().flatten().flatten();
    let files = files.filter(|entry| entry.file_name() != "tests.rs");
    let newest = files.filter_map(|entry| modified(&entry.path())).max();
    assert!(newest <= Some(built), "{} is older than its source; {how}", path.display());
    path
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|metadata| metadata.modified()).ok()
}
