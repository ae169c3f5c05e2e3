//! The power fails after each change of a save, of an overwrite, of a prune.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Mutex;

use forebay_store::power::{Recording, Survival};

use crate::world::*;

/// Images with some of what was not synced, for each change: more are made with `FOREBAY_POWER_SEEDS`.
const SEEDS: u64 = 2;

/// Puts every image from change `first` on in a folder of its own and looks at it; returns how many there were.
///
/// Images with the same bytes are looked at once between two of the `marks`, at which what may be found changes.
fn for_each(
    recording: &Recording,
    first: usize,
    marks: &[usize],
    look: impl Fn(&Path, usize) + Sync,
) -> usize {
    let seeds = std::env::var("FOREBAY_POWER_SEEDS").ok();
    let seeds = seeds.map_or(SEEDS, |seeds| seeds.parse().unwrap());
    let points: Vec<(usize, Survival)> = (first..=recording.changes())
        .flat_map(|at| {
            // Other seeds at each change, and the same ones in each run.
            let seeded = (0..seeds).map(move |seed| Survival::Seeded(at as u64 * 1000 + seed));
            let whole = [Survival::Everything, Survival::Synced];
            whole.into_iter().chain(seeded).map(move |way| (at, way))
        })
        .collect();
    let half = points.len() / 2;
    let seen = Mutex::new(HashSet::new());
    std::thread::scope(|scope| {
        for part in [&points[..half], &points[half..]] {
            let (look, seen) = (&look, &seen);
            scope.spawn(move || {
                for &(at, way) in part {
                    let image = recording.image(at, way);
                    let reached = marks.iter().filter(|mark| at >= **mark).count();
                    let mut hasher = DefaultHasher::new();
                    (reached, image.contents()).hash(&mut hasher);
                    if !seen.lock().unwrap().insert(hasher.finish()) {
                        continue;
                    }
                    let folder = folder();
                    image.write_to(folder.path()).unwrap();
                    let change = at.checked_sub(1).map(|last| recording.describe(last));
                    let context = Context(format!("after {at} changes ({change:?}), {way:?}"));
                    look(folder.path(), at);
                    std::mem::forget(context);
                }
            });
        }
    });
    let different = seen.into_inner().unwrap().len();
    println!("{different} different images of {}", points.len());
    different
}

struct Context(String);

impl Drop for Context {
    fn drop(&mut self) {
        println!("the image {}", self.0);
    }
}

fn save_recorded(recording: &Recording, step: u64, number: u32, world: u32) {
    let roots: Vec<_> = (0..world).map(|_| root(recording.store())).collect();
    save_all(&roots, step, number).into_iter().for_each(|end| assert!(end.unwrap(), "durable"));
}

#[test]
fn a_loss_of_power_leaves_whole_steps_and_what_was_said_to_be_committed() {
    for world in [1, 2] {
        let live = folder();
        let recording = Recording::start(live.path()).unwrap();
        save_recorded(&recording, 7, 1, world);
        let first = recording.changes();
        save_recorded(&recording, 7, 2, world);
        let second = recording.changes();
        save_recorded(&recording, 8, 3, world);
        let third = recording.changes();
        let marks = [first, second, third];
        let images = for_each(&recording, 0, &marks, |folder, at| {
            let allowed: &[Option<u32>] = match at {
                at if at >= second => &[Some(2)],
                at if at >= first => &[Some(1), Some(2)],
                _ => &[None, Some(1)],
            };
            let (seven, eight) = (load(folder, 7), load(folder, 8));
            assert!(allowed.contains(&seven), "{seven:?}");
            match at {
                at if at < second => assert_eq!(eight, None),
                at if at == third => assert_eq!(eight, Some(3)),
                _ => assert!([None, Some(3)].contains(&eight), "{eight:?}"),
            }
            go_on(folder, 7, 4);
        });
        println!("{images} images of {third} changes, {world} ranks");
        // Nearly each change makes another image, and what is not synced makes more.
        assert!(images > third, "{images} of {third}");
    }
}

#[test]
fn a_loss_of_power_in_a_prune_leaves_whole_steps() {
    let live = folder();
    let recording = Recording::start(live.path()).unwrap();
    save_recorded(&recording, 7, 1, 1);
    save_recorded(&recording, 8, 2, 1);
    let before = recording.changes();
    assert!(prune_to_one(&root(recording.store())));
    let after = recording.changes();
    let images = for_each(&recording, before, &[after], |folder, at| {
        let seven = load(folder, 7);
        assert!(if at == after { seven.is_none() } else { [None, Some(1)].contains(&seven) });
        assert_eq!(load(folder, 8), Some(2), "the newest stays");
        assert!(prune_to_one(&plain(folder)));
        assert_eq!(load(folder, 7), None);
        go_on(folder, 8, 3);
    });
    println!("{images} images of {} changes of a prune", after - before);
    assert!(images > after - before, "{images}");
}
