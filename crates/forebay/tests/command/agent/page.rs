//! The page in a browser: it fits a phone, keeps to its own policy, takes news by itself, and its buttons work.
//!
//! With `FOREBAY_SCREENSHOTS` set to a folder the pictures are kept there, to be looked at.

use std::path::Path;

use super::browser::Browser;
use super::{ACT_TOKEN, Site};
use crate::ckpt_make::State;

const PHONE: (u32, u32) = (390, 844);
const DESK: (u32, u32) = (1280, 900);

/// A site with something of everything: moves that take a while, names, holds, an error.
fn busy() -> Site {
    let site = Site::with_tls(
        "write_limit = \"2 MB/s\"",
        "listen = \"127.0.0.1:0\"\naction_token_file = \"act.token\"",
    );
    site.save("local", &[1000, 2000, 3000, 4000], &State::new(1).with_rows(2048));
    let step = site.path("archive").join(forebay_checkpoint::commit::step_folder(9));
    std::fs::create_dir(&step).unwrap();
    std::fs::write(step.join(".metadata"), "forebay <b>not</b> metadata").unwrap();
    site
}

fn keep(name: &str, picture: &[u8]) {
    assert!(picture.starts_with(b"\x89PNG"), "no picture");
    if let Some(folder) = std::env::var_os("FOREBAY_SCREENSHOTS") {
        std::fs::write(Path::new(&folder).join(name), picture).unwrap();
    }
}

/// Nothing to scroll sideways, nothing that the policy blocked, nothing that failed to load.
fn fits(browser: &mut Browser, what: &str) {
    let widths = browser.value("[document.documentElement.scrollWidth, innerWidth]");
    assert!(widths[0].as_u64() <= widths[1].as_u64(), "{what}: {widths}");
    let outside = "[...document.querySelectorAll('main *')]\
                   .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length";
    assert_eq!(browser.value(outside), 0, "{what}: something sticks out");
    let troubles: Vec<_> = browser
        .events
        .iter()
        .filter(|event| match event["method"].as_str().unwrap_or_default() {
            "Log.entryAdded" => event["params"]["entry"]["level"] != "verbose",
            "Runtime.exceptionThrown" => true,
            _ => false,
        })
        .collect();
    assert!(troubles.is_empty(), "{what}: {troubles:?}");
}

#[test]
fn the_page_on_a_phone_and_on_a_desk() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(folder.path()) else {
        return eprintln!("skipped: no Chromium in PATH");
    };
    let site = busy();
    let agent = site.start();
    let mut client = agent.client();
    agent.until(None, "seen", |status| status.steps.len() >= 4 && !status.transfers.is_empty());
    for action in [
        serde_json::json!({"action": "pin", "step": 2000, "name": "golden-eval"}),
        serde_json::json!({"action": "hold", "step": 1000}),
    ] {
        client.act(None, &action).unwrap();
    }
    agent.until(None, "a few looks", |status| status.up_seconds > 7.0);
    let base = format!("https://127.0.0.1:{}", agent.http.unwrap().port());
    for (name, (width, height), mobile) in [("phone", PHONE, true), ("desk", DESK, false)] {
        for dark in [false, true] {
            browser.screen(width, height, mobile, dark);
            let shade = if dark { "dark" } else { "light" };
            browser.open(&format!("{base}/"));
            fits(&mut browser, name);
            assert_eq!(browser.value("document.querySelectorAll('.tiers > li').length"), 3);
            keep(&format!("{name}-{shade}.png"), &browser.picture());
            browser.open(&format!("{base}/checkpoints"));
            fits(&mut browser, name);
            assert!(browser.value("document.querySelectorAll('.step').length").as_u64() >= Some(4));
            keep(&format!("{name}-{shade}-checkpoints.png"), &browser.picture());
        }
    }
    // News without a reload.
    browser.open(&format!("{base}/"));
    browser.value("window.here = true");
    client.act(None, &serde_json::json!({"action": "pause", "tier": "archive"})).unwrap();
    browser.wait("document.querySelector('.tiers > li:nth-child(3)').innerText.includes('paused')");
    assert_eq!(browser.value("window.here"), true, "it was reloaded");
    buttons(&mut browser, &base);
    let status = agent.status(None);
    assert!(!status.tiers[2].paused, "the button worked");
}

fn buttons(browser: &mut Browser, base: &str) {
    browser.screen(PHONE.0, PHONE.1, true, false);
    browser.open(&format!("{base}/login"));
    fits(browser, "log in");
    keep("phone-login.png", &browser.picture());
    browser.value(&format!("document.querySelector('#token').value = '{ACT_TOKEN}'"));
    browser.value("document.querySelector('.login').submit()");
    browser.wait("location.pathname === '/' && document.querySelector('main form') !== null");
    assert_eq!(browser.value("document.cookie"), "", "no script sees the cookie");
    browser.value("document.querySelector('.step details').open = true");
    fits(browser, "buttons");
    keep("phone-actions.png", &browser.picture());
    let resume =
        "[...document.querySelectorAll('.tiers button')].find(b => b.innerText === 'Resume')";
    browser.value(&format!("{resume}.click()"));
    browser.wait(&format!("document.readyState === 'complete' && {resume} === undefined"));
}
