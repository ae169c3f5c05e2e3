//! Real S3 servers as a tier, with answers of servers in trouble. Skipped, and said so, where there are none.

use std::sync::{Arc, Mutex};

use forebay_store::{MemoryStore, Store, open_store};
use forebay_tier::runner::{Runner, Tiers};
use forebay_tier::status::{CopyState, Health};

use crate::setup::{config, save_all, settle, start, tables, tier, until};
use crate::world::files;
use server::proxy::{self, Action, Request};

#[path = "../../../forebay-store/tests/servers/mod.rs"]
mod server;

/// An answer that every change, or everything, gets for now.
type Trouble = Arc<Mutex<Option<(bool, u16, &'static str)>>>;

/// The first server that is there, behind a proxy that makes trouble.
fn troubled() -> Option<(server::Server, std::net::SocketAddr, Trouble)> {
    let server = server::s3s().or_else(server::moto)?;
    let trouble: Trouble = Arc::default();
    let of = Arc::clone(&trouble);
    let decide = move |request: &Request<'_>| match *of.lock().unwrap() {
        Some((changes_only, status, code)) => {
            let changes = !matches!(request.method, "GET" | "HEAD");
            if changes || !changes_only { Action::Answer(status, code) } else { Action::Pass }
        }
        None => Action::Pass,
    };
    let address = proxy::start(server.address, decide);
    Some((server, address, trouble))
}

fn world(address: std::net::SocketAddr) -> (Arc<dyn Store>, Arc<dyn Store>, Runner) {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    // Trouble is to be told within the time of a test.
    let settings = forebay_store::StoreSettings {
        retries: 1,
        retry_time: std::time::Duration::from_secs(2),
        ..server::settings(address)
    };
    let far = open_store(&server::fresh_url(), &settings).unwrap();
    let runner = start(&config(&tables(&["near", "far"])), &[Arc::clone(&near), Arc::clone(&far)]);
    (near, far, runner)
}

#[test]
fn a_bucket_gets_every_step_as_it_was_saved() {
    let Some(reached) = server::reached(server::s3s().or_else(server::moto)) else { return };
    let above = tempfile::tempdir().unwrap();
    let settings = server::settings(reached.in_turn);
    let place = |name: &str| above.path().join(name).display().to_string();
    let text = format!(
        "[[tier]]\nname = \"near\"\nplace = \"{}\"\nkeep_last = 1\n\
         [[tier]]\nname = \"shared\"\nplace = \"{}\"\n\
         [[tier]]\nname = \"bucket\"\nplace = \"{}\"\n[tier.store]\nendpoint = \"{}\"\n\
         region = \"us-east-1\"\n",
        place("near"),
        place("shared"),
        server::fresh_url(),
        settings.endpoint.unwrap()
    );
    let tiers = Tiers::open(&config(&text)).unwrap();
    let root = |tier| tiers.root(tier).unwrap();
    save_all(&root(0).store, &[1, 2, 3]);
    let saved: Vec<_> = [1, 2, 3].map(|step| files(&*root(0).store, step)).into();
    let runner = Runner::start(Arc::clone(&tiers)).unwrap();
    settle(&runner);
    for (step, saved) in (1..).zip(&saved) {
        assert_eq!(&files(&*root(1).store, step), saved);
        assert_eq!(&files(&*root(2).store, step), saved);
    }
    let status = runner.status();
    assert_eq!(tier(&status, "bucket").committed, 3);
    assert!(tier(&status, "bucket").notes.iter().any(|note| note.contains("atomic")));
}

fn heals(changes_only: bool, status: u16, code: &'static str, health: &[Health]) {
    let Some((_server, address, trouble)) = troubled() else { return };
    let (near, far, runner) = world(address);
    until(&runner, "well", |status| tier(status, "far").health == Health::Ok);
    *trouble.lock().unwrap() = Some((changes_only, status, code));
    save_all(&near, &[1]);
    runner.wake();
    let status = until(&runner, "seen", |status| health.contains(&tier(status, "far").health));
    assert!(status.errors.iter().any(|error| error.tier == Some(1)), "{status:#?}");
    assert!(tier(&status, "near").health == Health::Ok);
    *trouble.lock().unwrap() = None;
    until(&runner, "moved", |status| {
        status.steps.first().is_some_and(|step| step.copies[1] == CopyState::Committed)
    });
    assert_eq!(files(&*far, 1), files(&*near, 1));
}

#[test]
fn a_bucket_that_says_slow_down_is_seen_and_heals() {
    heals(false, 503, "SlowDown", &[Health::Down, Health::Troubled]);
}

#[test]
fn a_bucket_that_may_not_be_written_is_seen_and_heals() {
    heals(true, 403, "AccessDenied", &[Health::ReadOnly]);
}

#[test]
fn credentials_that_have_expired_are_seen_and_heal() {
    heals(false, 400, "ExpiredToken", &[Health::Down]);
}
