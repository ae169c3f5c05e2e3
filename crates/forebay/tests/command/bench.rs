//! The benchmark makes its model, measures, and leaves nothing.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::util::{forebay, json_of, run, skip, stderr, stdout, text};

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn warm_loads_beside_their_limit() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["bench", "load", "--device", "host", "--gb", "0.1", "--repeat", "2", "--json"];
    let lists = ["--threads", "1,2", "--paths", "auto,fallback", "--dir", text(folder.path())];
    let report = json_of(forebay().args(args).args(lists));
    assert!(is_empty(folder.path()));
    assert_eq!(report["model"]["bytes"].as_u64().unwrap() / 1_000_000, 99);
    assert_eq!(report["cache"]["state"], "warm");
    assert_eq!(report["limits"][0]["what"], "memory-copy");
    let rows = report["results"].as_array().unwrap();
    let settings: Vec<_> =
        rows.iter().map(|row| (row["path"].as_str().unwrap(), row["threads"].as_u64())).collect();
    let wanted =
        [("auto", Some(1)), ("auto", Some(2)), ("fallback", Some(1)), ("fallback", Some(2))];
    assert_eq!(settings, wanted);
    for row in rows {
        assert_eq!(row["loads"].as_array().unwrap().len(), 2);
        let rate = |key: &str| row["gb_per_s"][key].as_f64().unwrap();
        assert!(
            rate("min") > 0.0 && rate("min") <= rate("median") && rate("median") <= rate("max")
        );
        assert!(row["cpu_ms_per_gb"]["median"].as_f64().unwrap() > 0.0);
        assert!(row["ratio_to_limit"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn cold_loads_are_cold_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let args =
        ["bench", "load", "--device", "host", "--gb", "0.05", "--repeat", "2", "--cache", "cold"];
    let output = forebay().args(args).args(["--dir", text(folder.path())]).output().unwrap();
    if stderr(&output).contains("never cold") {
        skip("the temporary folder is in memory");
    } else {
        assert!(output.status.success(), "{}", stderr(&output));
        let shown = stdout(&output);
        assert!(shown.contains("page cache cold") && shown.contains("limit: disk"), "{shown}");
    }
    assert!(is_empty(folder.path()));
    if Path::new("/dev/shm").is_dir() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let output = forebay().args(args).args(["--dir", text(folder.path())]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("error[unsupported]: tmpfs"), "{}", stderr(&output));
        assert!(is_empty(folder.path()));
    }
    let odd = run(&["bench", "load", "--gb", "1", text(folder.path())]);
    assert_eq!(odd.status.code(), Some(2), "a size for a model that is given");
}

#[test]
fn a_signal_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["bench", "load", "--device", "host", "--gb", "3", "--dir", text(folder.path())];
    let child = forebay().args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while is_empty(folder.path()) {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(is_empty(folder.path()));
}
