//! Tests of the agent's side: who is left, who is let in, what comes after the end.

use super::*;
use crate::socket::frame::ANSWER_BYTES_MAX;
use std::io::Read;

struct Nobody;

impl Tracker for Nobody {
    fn track(&self, job: &str, _: OwnedFd, _: u32) -> Result<Value> {
        Err(Error::new(Code::Unsupported, "nothing is tracked here").at(job))
    }

    fn untrack(&self, job: &str, _: u32) -> Result<()> {
        Err(Error::new(Code::NotFound, "nothing is tracked here").at(job))
    }
}

fn shared(users: Vec<u32>, most: Duration, crowded: Duration) -> Arc<Shared> {
    let (jobs, counts, tracker) = (Arc::default(), Arc::default(), Arc::new(Nobody));
    let saves = Saves::new(0, crate::staged::Times::default(), Arc::clone(&counts));
    Arc::new(Shared::new(jobs, counts, tracker, saves, users, Idle { most, crowded }))
}

const LONG: Duration = Duration::from_secs(30);
const MS: Duration = Duration::from_millis(1);

fn own() -> Peer {
    Peer { uid: rustix::process::geteuid().as_raw(), pid: None }
}

fn ask(stream: &UnixStream) -> Result<String> {
    // Who is refused is told so before anything is read, and may find nobody to write to.
    let _ = send(stream, br#"{"request":"jobs"}"#, &[], LONG);
    let frame = Reader::new(stream).next(ANSWER_BYTES_MAX, Some(LONG), LONG)?;
    Ok(String::from_utf8(frame.unwrap().text).unwrap())
}

#[test]
fn who_is_idle_is_left_without_a_word() {
    let peer = own();
    let shared = shared(vec![peer.uid], MS * 300, MS * 200);
    let (_end, ended) = watch::channel(false);
    let (mut client, server) = UnixStream::pair().unwrap();
    shared.start(server, peer, None, ended).unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(ask(&client).unwrap(), r#"{"ok":[]}"#, "it is not idle");
    }
    client.set_read_timeout(Some(LONG)).unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{rest:?}");
}

#[test]
fn where_all_places_are_taken_the_idle_make_room() {
    let shared = shared(vec![own().uid], LONG, MS * 100);
    let (_end, ended) = watch::channel(false);
    let (mut client, server) = UnixStream::pair().unwrap();
    shared.start(server, own(), None, ended).unwrap();
    std::thread::sleep(MS * 500);
    assert!(ask(&client).unwrap().contains("ok"), "there is room");
    shared.counts.socket_clients.fetch_add(CLIENTS_MAX as i64, Ordering::Relaxed);
    client.set_read_timeout(Some(LONG / 2)).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "it is left");
}

/// Promotes until it is told that it may end.
struct Slow(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

impl crate::work::Work for Slow {
    fn status(&self) -> forebay_tier::status::Status {
        forebay_tier::status::Status::default()
    }

    fn wake(&self) {}

    fn act(&self, action: &Value, _: &str) -> Result<Value> {
        if action["action"] == "promote" {
            let _ = self.0.lock().unwrap().recv();
        }
        Ok(Value::Null)
    }
}

#[test]
fn promotions_leave_places_for_others() {
    let shared = shared(vec![own().uid], LONG, LONG);
    let (go, gate) = std::sync::mpsc::channel();
    shared.jobs.add("a", Arc::new(Slow(std::sync::Mutex::new(gate)))).unwrap();
    let act = |name: &str| shared.act(None, &json!({"action": name}), own());
    std::thread::scope(|scope| {
        for _ in 0..COPIES_MAX {
            scope.spawn(|| act("promote").unwrap());
        }
        let start = std::time::Instant::now();
        while shared.copies.available_permits() > 0 && start.elapsed() < LONG {
            std::thread::sleep(MS);
        }
        let refused = act("promote").unwrap_err();
        assert_eq!(refused.code(), Code::Unsupported);
        act("pause").unwrap();
        drop(go);
    });
    act("promote").unwrap();
}

#[test]
fn places_are_kept_for_root_and_the_agents_user() {
    let own = own();
    let other = Peer { uid: own.uid + 1, pid: None };
    let shared = shared(vec![own.uid, other.uid], LONG, LONG);
    let (_end, ended) = watch::channel(false);
    let connect = |peer| {
        let (client, server) = UnixStream::pair().unwrap();
        shared.start(server, peer, None, ended.clone()).unwrap();
        client
    };
    const { assert!(OTHERS_MAX * 4 <= CLIENTS_MAX * 3, "a quarter is for them") };
    let mut held: Vec<_> = (0..OTHERS_MAX).map(|_| connect(other)).collect();
    let refused = ask(&connect(other)).unwrap_or_else(|error| error.render());
    assert!(refused.contains("as many clients"), "{refused}");
    assert!(ask(&connect(own)).unwrap().contains("ok"));
    let last = held.pop().unwrap();
    assert!(ask(&last).unwrap().contains("ok"), "who was there first is answered");
    drop(last);
    // Its thread sees the end of it.
    let again = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        ask(&connect(other)).is_ok_and(|answer| answer.contains("ok"))
    });
    assert!(again, "a place that was left is given away");
}

#[test]
fn nothing_is_answered_after_the_end() {
    let peer = own();
    let shared = shared(vec![peer.uid], LONG, LONG);
    let (end, ended) = watch::channel(false);
    let (client, server) = UnixStream::pair().unwrap();
    shared.start(server, peer, None, ended).unwrap();
    assert!(ask(&client).unwrap().contains("ok"));
    end.send(true).unwrap();
    assert!(ask(&client).unwrap().contains("cancelled"));
}
