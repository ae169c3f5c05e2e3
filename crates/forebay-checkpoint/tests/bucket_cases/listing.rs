//! Listings of buckets: few requests, and hints that are not believed.

use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_checkpoint::commit::{
    Clock, GcOptions, Identify, PruneOptions, Retention, State, StepState, gc, latest, listing,
    prune, require, steps,
};
use forebay_engine::RangeSource;
use forebay_store::StoreSettings;
use servers::proxy::Action;

use super::*;

/// `.metadata` that is the name of its attempt.
struct Named;

impl Identify for Named {
    fn attempt(&self, metadata: &dyn RangeSource) -> Result<Option<AttemptId>> {
        let mut bytes = vec![0; metadata.len() as usize];
        read_exact_at(metadata, &mut bytes, 0)?;
        String::from_utf8(bytes).unwrap().parse().map(Some)
    }

    fn files(&self, _metadata: &dyn RangeSource) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

fn named(url: &str, address: SocketAddr) -> Root {
    Root { identify: Arc::new(Named), ..root(url, address) }
}

/// Time that does not pass: in a bucket a collector waits for what is being published, and here nothing is.
struct Hurried(SystemClock);

impl Clock for Hurried {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep(&self, _time: Duration) {}
}

fn save_step(root: &Root, step: u64) {
    let id = AttemptId { run: RunId(7), save: step as u32 };
    let spec = Spec {
        folder: format!("step-{step}"),
        step,
        attempt: id,
        rank: 0,
        world: 1,
        structure: StructureHash([7; 32]),
        epoch: 0,
        parent: step.checked_sub(1),
        part_bytes: 256,
        who: "writer".to_owned(),
    };
    let attempt = Attempt::begin(root, &Policy::default(), None, spec).unwrap();
    commit(attempt, id).unwrap();
}

#[test]
fn steps_are_found_among_very_many_other_objects() {
    let store = forebay_store::open_store("memory:", &StoreSettings::default()).unwrap();
    let (clock, identify) = (Arc::new(SystemClock::default()), Arc::new(Named));
    let root = Root { store: store.clone(), clock, identify };
    (1..4).for_each(|step| save_step(&root, step));
    let found = || {
        let list = |states: Vec<StepState>| -> Vec<_> {
            let commit = |state: &StepState| state.commit.as_ref().unwrap().attempt;
            states.iter().map(|state| (state.step, state.state(), commit(state))).collect()
        };
        let long = Duration::from_secs(60);
        let latest = latest(&root).unwrap().unwrap().step;
        (list(steps(&root, long).unwrap()), list(listing(&root, long).unwrap()), latest)
    };
    let before = found();
    assert_eq!((before.0.len(), before.2), (3, 3));
    assert_eq!(before.0, before.1);
    // One more than are listed at once.
    for number in 0..50_001 {
        store.put(&format!("data/{number}"), b"").unwrap();
    }
    assert_eq!(found(), before);
}

#[test]
fn steps_are_listed_by_few_requests_and_as_they_are() {
    const STEPS: u64 = 40;
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    let own = named(&url, server.in_turn);
    (0..STEPS).for_each(|step| save_step(&own, step));
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let counting = servers::proxy::start(server.in_turn, move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Action::Pass
    });
    let root = named(&url, counting);
    let requests = |of: &dyn Fn()| {
        let before = count.load(Ordering::SeqCst);
        of();
        count.load(Ordering::SeqCst) - before
    };
    let few = requests(&|| {
        let listed = listing(&root, Duration::ZERO).unwrap();
        let read = steps(&own, Duration::ZERO).unwrap();
        assert_eq!(listed.len() as u64, STEPS);
        for (listed, read) in listed.iter().zip(&read) {
            let (mut listed, mut read) = (listed.clone(), read.clone());
            for state in [&mut listed, &mut read] {
                state.commit.as_mut().unwrap().files.clear();
                state.commit.as_mut().unwrap().age = Duration::ZERO;
            }
            assert_eq!(listed, read);
        }
    });
    assert!(few <= 3, "{few} requests for {STEPS} steps");
    let newest = requests(&|| {
        assert_eq!(latest(&root).unwrap().unwrap().step, STEPS - 1);
    });
    assert!(newest <= 10, "{newest} requests for the latest");
    let one = requests(&|| assert_eq!(require(&root, 3).unwrap().step, 3));
    assert!(one <= 6, "{one} requests for a step");
}

#[test]
fn hints_are_not_believed_where_they_are_used() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    let root = named(&url, server.in_turn);
    (1..=4).for_each(|step| save_step(&root, step));
    // The newest commit is gone, and its key is there.
    root.store.remove("step-4/.metadata").unwrap();
    assert_eq!(latest(&root).unwrap().unwrap().step, 3);
    let states = listing(&root, Duration::ZERO).unwrap();
    assert_eq!(states[3].state(), State::Lost);
    // The record of the newest is damaged: a listing does not see it, whoever asks for the latest does.
    let record = "step-3/.forebay/00000007-3/decision";
    let (mut bytes, _) = root.store.get(record, 1 << 20).unwrap().unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    root.store.put(record, &bytes).unwrap();
    assert_eq!(listing(&root, Duration::ZERO).unwrap()[2].commit.as_ref().unwrap().damage, None);
    assert_eq!(latest(&root).unwrap_err().code(), Code::InvalidMetadata);
    // Keys of others, and of steps that were never there.
    for key in ["9_00000007-9_0_-_1_0_100", "2_00000008-1_9_-_1_0_7", "rubbish"] {
        root.store.put(&format!(".forebay/commits/{key}"), b"").unwrap();
    }
    let states = listing(&root, Duration::ZERO).unwrap();
    assert_eq!(states.iter().map(|state| state.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(states[1].commit.as_ref().unwrap().epoch, 0);
}

#[test]
fn keys_go_with_what_they_tell() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    let own = named(&url, server.in_turn);
    let root = Root { clock: Arc::new(Hurried(SystemClock::default())), ..own };
    (1..=3).for_each(|step| save_step(&root, step));
    let keys = || root.store.names(".forebay/commits/", 100).unwrap().len();
    assert_eq!(keys(), 3);
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let now = GcOptions { grace: Duration::ZERO, settle: Duration::ZERO, ..GcOptions::default() };
    let options = PruneOptions { gc: now, wait: true };
    let report = prune(&root, &retention, &options).unwrap();
    assert_eq!(report.unpublished, [1, 2]);
    gc(&root, &options.gc).unwrap();
    assert_eq!((keys(), numbers(&root).unwrap()), (1, vec![3]));
}
