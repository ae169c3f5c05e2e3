//! A failure of one rank is one error on all of them, soon, and leaves what was committed.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, Committed, GcOptions, Policy, Root, Spec, StructureHash, gc,
};
use forebay_error::{Code, Error, Result};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Channel, Sim};
use crate::world::*;

const WORLD: u32 = 3;

#[test]
fn a_full_disk_on_one_rank_is_one_error_on_all_within_seconds_and_the_old_step_stays() {
    let job = Job::new();
    job.save_step(5, attempt(1, 0), WORLD);
    let files = MemoryStore::used_bytes(&job.store);
    // Room for begin records and rooms, and for two of three data files.
    job.store.set_capacity(files + 3 * (8192 + 1024) + 2 * 3000 + 1500);
    let roots = vec![job.root.clone(); WORLD as usize];
    let (results, took) = save_all(&job.sim, &roots, |rank| spec(5, attempt(1, 1), rank, WORLD));
    assert!(results.iter().all(|result| code(result) == Some(Code::NoSpace)), "{results:?}");
    let errors: Vec<String> =
        results.iter().map(|result| result.as_ref().unwrap_err().to_string()).collect();
    let named = errors.iter().filter(|text| text.contains("failed on rank ")).count();
    assert!(named >= 2, "the ranks that did not meet it say whose it is: {errors:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(load(&job.store, 5), Some(attempt(1, 0)));
    // What the attempt had written is gone already, so that there is room again.
    assert!(job.store.used_bytes() < files + 2 * 4096, "{} {files}", job.store.used_bytes());
    job.store.set_capacity(u64::MAX);
    job.save_step(5, attempt(1, 2), WORLD);
    collect_all(&job.root, &job.store, &job.sim);
}

#[test]
fn a_withdrawal_on_a_full_disk_tells_the_ranks_that_are_still_there() {
    let job = Job::new();
    let waiting = |rank: u32| {
        let mut begun =
            Attempt::begin(&job.root, &policy(), None, spec(5, attempt(1, 0), rank, 2)).unwrap();
        write(&mut begun, attempt(1, 0), rank).unwrap();
        begun
    };
    let begun = waiting(0);
    job.sim.advance(HOUR);
    job.store.set_capacity(job.store.used_bytes());
    let collecting = || {
        let options = GcOptions { settle: Duration::from_secs(600), ..GcOptions::default() };
        gc(&job.root, &options).unwrap();
        None
    };
    let hearing = || {
        job.sim.clock_wait(Duration::from_secs(1));
        let took = job.sim.clock_now();
        let result = begun.wait_or_commit(&mut |gathered| Ok(assemble(attempt(1, 0), gathered)));
        Some((result, job.sim.clock_now() - took))
    };
    type Heard = Option<(Result<Committed>, Duration)>;
    let actors: Vec<Actor<'_, Heard>> = vec![Box::new(collecting), Box::new(hearing)];
    let (results, _) = job.sim.run(actors);
    let (result, took) = results[1].as_ref().unwrap();
    assert_eq!(code(result), Some(Code::Fenced), "{result:?}");
    assert!(*took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_rank_that_finds_the_disk_full_from_the_start_stops_the_others_all_the_same() {
    let job = Job::new();
    let mut early =
        Attempt::begin(&job.root, &policy(), None, spec(5, attempt(1, 0), 0, 2)).unwrap();
    write(&mut early, attempt(1, 0), 0).unwrap();
    job.store.set_capacity(job.store.used_bytes());
    let late = || {
        let begun = Attempt::begin(&job.root, &policy(), None, spec(5, attempt(1, 0), 1, 2));
        (begun.map(|_| ()).unwrap_err(), job.sim.clock_now())
    };
    let waiting = || {
        let result = early.wait_or_commit(&mut |gathered| Ok(assemble(attempt(1, 0), gathered)));
        (result.map(|_| ()).unwrap_err(), job.sim.clock_now())
    };
    let before = job.sim.clock_now();
    let actors: Vec<Actor<'_, (Error, Duration)>> = vec![Box::new(late), Box::new(waiting)];
    let (results, _) = job.sim.run(actors);
    // There was no room to say more than that it is over: an empty record, which tells why all the same.
    let codes = results.iter().map(|(error, _)| error.code());
    assert_eq!(codes.collect::<Vec<_>>(), [Code::NoSpace, Code::NoSpace], "{results:?}");
    assert!(results[1].0.what().contains("the disk is full"), "{results:?}");
    assert!(results.iter().all(|(_, at)| *at - before < Duration::from_secs(5)), "{results:?}");
    job.store.set_capacity(u64::MAX);
    job.save_step(5, attempt(1, 1), WORLD);
    collect_all(&job.root, &job.store, &job.sim);
}

#[test]
fn a_collection_on_a_full_disk_frees_it() {
    let job = Job::new();
    let store: Arc<dyn Store> = Arc::new(job.store.clone());
    let roots: Vec<Root> = (0..WORLD)
        .map(|rank| {
            let plan = if rank == 1 { Plan::at(20, Fault::Kill) } else { Plan::none() };
            root(Arc::new(FaultStore::new(Arc::clone(&store), plan)), &job.sim)
        })
        .collect();
    // Killed in the middle, all of them: nobody cleans up.
    let dead: Vec<Root> = roots
        .iter()
        .map(|_| {
            let client = FaultStore::new(Arc::clone(&store), Plan::at(14, Fault::Kill));
            root(Arc::new(client), &job.sim)
        })
        .collect();
    let (results, _) = save_all(&job.sim, &dead, |rank| spec(5, attempt(1, 0), rank, WORLD));
    assert!(results.iter().all(Result::is_err));
    job.store.set_capacity(job.store.used_bytes());
    collect_all(&job.root, &job.store, &job.sim);
    assert_eq!(job.store.used_bytes(), 0);
}

/// Ranks with specs of their own. Returns their codes.
fn codes(job: &Job, spec: impl Fn(u32) -> Spec) -> (Vec<Option<Code>>, Vec<String>, Duration) {
    let actor = |rank| -> Actor<'static, Result<Committed>> {
        let (root, spec) = (job.root.clone(), spec(rank));
        Box::new(move || save(&root, None, spec))
    };
    let (results, took) = job.sim.run((0..WORLD).map(actor).collect());
    let text = |result: &Result<Committed>| match result {
        Ok(committed) => format!("{committed:?}"),
        Err(error) => error.render(),
    };
    (results.iter().map(code).collect(), results.iter().map(text).collect(), took)
}

#[test]
fn ranks_that_are_built_differently_all_say_so() {
    let job = Job::new();
    let (got, texts, took) = codes(&job, |rank| {
        let mut spec = spec(5, attempt(1, 0), rank, WORLD);
        spec.structure = StructureHash([u8::from(rank == 1); 32]);
        spec
    });
    assert_eq!(got, [Some(Code::StructureMismatch); WORLD as usize], "{texts:?}");
    assert!(texts[2].contains("rank 1"), "{texts:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(load(&job.store, 5), None);
    collect_all(&job.root, &job.store, &job.sim);
}

#[test]
fn ranks_that_count_each_other_differently_all_say_so() {
    for odd in 0..WORLD {
        let job = Job::new();
        let (got, texts, took) = codes(&job, |rank| {
            spec(5, attempt(1, 0), rank, if rank == odd { WORLD + 1 } else { WORLD })
        });
        assert_eq!(got, [Some(Code::StructureMismatch); WORLD as usize], "{texts:?}");
        assert!(took < LONGEST_WAIT, "{took:?}");
        collect_all(&job.root, &job.store, &job.sim);
    }
}

#[test]
fn storage_that_is_not_shared_is_noticed_on_every_node() {
    // Each node has a disk of its own; the first has two ranks.
    let stores = [MemoryStore::new(), MemoryStore::new()];
    let sim = Sim::new(&stores[0]);
    let disk = |rank: u32| usize::from(rank == 2);
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let root = root(Arc::new(stores[disk(rank)].clone()), &sim);
        Box::new(move || save(&root, None, spec(5, attempt(1, 0), rank, WORLD)))
    };
    let (results, took) = sim.run((0..WORLD).map(actor).collect());
    assert_eq!(code(&results[2]), Some(Code::NotShared), "{results:?}");
    for result in &results[..2] {
        let text = result.as_ref().unwrap_err().render();
        assert_eq!(code(result), Some(Code::Timeout), "{text}");
        assert!(text.contains("rank 2 of 3 never began") && text.contains("share"), "{text}");
    }
    assert!(took < policy().appear * 2, "{took:?}");
    assert!(stores.iter().all(|store| load(store, 5).is_none()));
}

#[test]
fn a_rank_that_dies_silently_is_named_after_its_lease() {
    let job = Job::new();
    let store: Arc<dyn Store> = Arc::new(job.store.clone());
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let plan = if rank == 1 { Plan::at(12, Fault::Kill) } else { Plan::none() };
        let client = FaultStore::new(Arc::clone(&store), plan);
        let root = root(Arc::new(client), &job.sim);
        Box::new(move || save(&root, None, spec(5, attempt(1, 0), rank, WORLD)))
    };
    let (results, took) = job.sim.run((0..WORLD).map(actor).collect());
    for rank in [0, 2] {
        let error = results[rank].as_ref().unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        assert!(error.what().contains("rank 1 (host:1)"), "{error:?}");
    }
    assert!(took < policy().lease * 2, "{took:?}");
}

#[test]
fn a_rank_whose_store_fails_for_good_tells_the_others_by_hints() {
    let job = Job::new();
    let store: Arc<dyn Store> = Arc::new(job.store.clone());
    let hints = Channel::of_world(&job.sim, WORLD);
    let actor = |(rank, hints)| -> Actor<'static, (Result<Committed>, Duration)> {
        // From its first write of data on, every call of rank 1 fails.
        let plan = if rank == 1 { Plan::from(14, Fault::Errno(5)) } else { Plan::none() };
        let root = root(Arc::new(FaultStore::new(Arc::clone(&store), plan)), &job.sim);
        let sim = Arc::clone(&job.sim);
        Box::new(move || {
            let result = save(&root, Some(hints), spec(5, attempt(1, 0), rank, WORLD));
            (result, sim.clock_now())
        })
    };
    let (results, _) = job.sim.run((0..WORLD).zip(hints).map(actor).collect());
    for (rank, (result, at)) in results.iter().enumerate() {
        assert_eq!(code(result), Some(Code::Io), "{result:?}");
        if rank != 1 {
            let error = result.as_ref().unwrap_err();
            assert!(error.what().contains("failed on rank 1"), "{error:?}");
            assert!(*at < Duration::from_secs(1), "{at:?}");
        }
    }
    collect_all(&job.root, &job.store, &job.sim);
}

#[test]
fn an_assembly_that_fails_fails_all_ranks_with_its_error() {
    let job = Job::new();
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let root = job.root.clone();
        Box::new(move || {
            let spec = spec(5, attempt(1, 0), rank, WORLD);
            let mut begun = Attempt::begin(&root, &policy(), None, spec)?;
            write(&mut begun, attempt(1, 0), rank)?;
            let fault = || Error::new(Code::Overlap, "two pieces cover row 3").at("tensor w");
            begun.wait_or_commit(&mut |_| Err(fault()))
        })
    };
    let (results, took) = job.sim.run((0..WORLD).map(actor).collect());
    for result in &results {
        let error = result.as_ref().unwrap_err();
        assert_eq!((error.code(), error.place()), (Code::Overlap, Some("tensor w")));
        assert!(error.what().contains("two pieces cover row 3"), "{error:?}");
    }
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(job.store.list("", 100).unwrap().len(), 1, "only the decision is left");
}

#[test]
fn a_commit_that_refers_to_a_file_that_is_not_there_is_refused() {
    for (name, bytes, expected) in [
        ("00000001-0_0_0.distcp", 2999, Code::Truncated),
        ("00000001-0_0_9.distcp", 3000, Code::MissingFile),
        ("../step-4/x", 3000, Code::UnsafePath),
        (".hidden", 3000, Code::UnsafePath),
    ] {
        let job = Job::new();
        let spec = spec(5, attempt(1, 0), 0, 1);
        let mut begun = Attempt::begin(&job.root, &policy(), None, spec).unwrap();
        write(&mut begun, attempt(1, 0), 0).unwrap();
        let result = begun.wait_or_commit(&mut |gathered| {
            let mut assembled = assemble(attempt(1, 0), gathered);
            assembled.files[0].name = name.to_owned();
            assembled.files[0].bytes = bytes;
            Ok(assembled)
        });
        assert_eq!(code(&result), Some(expected), "{name}");
        assert_eq!(load(&job.store, 5), None);
    }
}

#[test]
fn a_step_that_must_not_be_replaced_is_refused_on_all_ranks_and_stays() {
    let job = Job::new();
    job.save_step(5, attempt(1, 0), WORLD);
    let policy = Policy { overwrite: false, ..policy() };
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let (root, policy) = (job.root.clone(), policy.clone());
        Box::new(move || save_with(&root, None, &policy, spec(5, attempt(1, 1), rank, WORLD)))
    };
    let (results, took) = job.sim.run((0..WORLD).map(actor).collect());
    assert_eq!(code(&results[0]), Some(Code::AlreadyExists), "{results:?}");
    assert!(results.iter().all(|result| code(result) == Some(Code::AlreadyExists)), "{results:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(load(&job.store, 5), Some(attempt(1, 0)));
}

#[test]
fn an_attempt_id_that_is_used_twice_is_refused_and_the_first_goes_on() {
    let job = Job::new();
    let first = spec(5, attempt(1, 0), 0, 2);
    let begun = Attempt::begin(&job.root, &policy(), None, first.clone()).unwrap();
    let second = Attempt::begin(&job.root, &policy(), None, first);
    assert_eq!(second.err().map(|error| error.code()), Some(Code::AlreadyExists));
    begun.check().unwrap();
    let rank_one = spec(5, attempt(1, 0), 1, 2);
    Attempt::begin(&job.root, &policy(), None, rank_one).unwrap();
}
