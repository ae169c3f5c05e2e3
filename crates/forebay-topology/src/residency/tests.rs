//! Each way to ask, forced, on one and the same file: the ways that this kernel would not choose
//! are tested too.

use std::os::unix::fs::FileExt;

use rustix::fs::Advice;
use rustix::process::Uid;

use super::*;

const MIB: u64 = 1 << 20;
const FILE_LEN: u64 = 8 * MIB;

/// A file on the disk of the source tree whose first half is in the page cache; none where pages
/// stay.
fn half_resident() -> Option<(tempfile::TempDir, File)> {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![1_u8; FILE_LEN as usize]).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    if probe(&file, 0, FILE_LEN).unwrap().resident_pages > 0 {
        println!("skipped: the pages of this file system cannot be dropped");
        return None;
    }
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    file.read_exact_at(&mut vec![0; (FILE_LEN / 2) as usize], 0).unwrap();
    Some((folder, file))
}

fn forced(file: &File, method: Method) -> Prober<'_> {
    let mut prober = Prober::new(file).unwrap();
    prober.method = method;
    prober
}

#[test]
fn every_way_gives_the_same_answer() {
    let Some((_folder, file)) = half_resident() else { return };
    for method in [Method::Cachestat, Method::Mincore, Method::Sampled] {
        let mut prober = forced(&file, method);
        let half = FILE_LEN / 2;
        let answers = [(0, FILE_LEN), (0, half), (half, half)]
            .map(|(offset, len)| prober.count(offset, len, PROBE_SAMPLES));
        let shares = answers.map(|answer| answer.unwrap().share());
        if prober.method != method {
            println!("skipped: {} is not to be had here", method.as_str());
            continue;
        }
        assert!((0.3..0.7).contains(&shares[0]), "{method:?} {shares:?}");
        assert!(shares[1] > 0.95 && shares[2] < 0.1, "{method:?} {shares:?}");
    }
}

/// The lie itself: to a thread of another user mincore calls the whole file resident, and a few
/// reads show it up.
#[test]
fn a_lie_of_mincore_is_found_out() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: acting as another user needs root");
        return;
    }
    let Some((_folder, file)) = half_resident() else { return };
    let (lie, answer) = std::thread::scope(|scope| {
        let as_nobody = || {
            // Of this thread only, which ends here.
            let nobody = Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(None, nobody, None).unwrap();
            let lie = sys::mincore(&file, 0, FILE_LEN as usize).unwrap();
            let mut prober = forced(&file, Method::Mincore);
            (lie, prober.count(0, FILE_LEN, PROBE_SAMPLES).unwrap())
        };
        scope.spawn(as_nobody).join().unwrap()
    });
    if lie.iter().any(|state| state & 1 == 0) {
        println!("skipped: this kernel answers anybody");
        return;
    }
    assert_eq!(answer.method, Method::Sampled);
    assert!((0.2..0.8).contains(&answer.share()), "{answer:?}");
}

#[test]
fn nine_tenths_count_as_resident() {
    let of = |pages, resident_pages| Resident {
        pages,
        resident_pages,
        dirty_pages: None,
        method: Method::Mincore,
    };
    assert!(of(10, 9).is_resident());
    assert!(!of(1024, 921).is_resident());
    assert!(of(1024, 922).is_resident());
    assert!(of(0, 0).is_resident());
    assert!(!of(u64::MAX, 0).is_resident());
}
