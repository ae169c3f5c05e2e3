//! Pages as text: everything is there, nothing gets out of it. In a browser they are looked at by the command's tests.

use forebay_tier::status::StepStatus;

use super::*;
use crate::testing::{HOSTILE, busy};

fn view<'a>(status: &'a Status, may_act: bool) -> View<'a> {
    View {
        jobs: vec!["default".to_owned()],
        job: "default",
        status,
        rates: vec![vec![(0.0, 1e9), (2e9, 3e9)]; 3],
        visitor: may_act.then(|| Visitor {
            name: "5e55".to_owned(),
            form: "f0rm".to_owned(),
            may_act,
        }),
        may_login: true,
        now: 1_790_000_060.0,
    }
}

#[test]
fn hostile_names_stay_text() {
    let status = busy();
    let pages = [
        overview(&view(&status, false)),
        overview(&view(&status, true)),
        checkpoints(&view(&status, true), 1),
        message(HOSTILE, HOSTILE),
    ];
    for page in pages {
        assert!(page.contains("&lt;script&gt;alert(1)"), "it is shown");
        assert!(!page.contains("<script>alert"), "{page}");
        assert!(!page.contains('\u{1b}') && !page.contains('\u{202e}'));
        for tag in page.split('<').skip(1) {
            let quotes = tag.split('>').next().unwrap().matches('"').count();
            assert_eq!(quotes % 2, 0, "<{tag}");
        }
    }
}

#[test]
fn all_of_the_status_is_on_the_page() {
    let status = busy();
    let page = overview(&view(&status, false));
    let expected = [
        "node-17 pid 4242",
        "up 25 h",
        "A tier is down",
        "nvme",
        "s3://runs/run1",
        "48.0 GB",
        " of 64.0 GB",
        "75 % full",
        "340 MB/s (limit 500 MB/s)",
        "1.20 GB/s",
        "paused",
        "nvme → lustre",
        "25 % done",
        "35 s left",
        "try 2",
        "1 step waits.",
        "golden",
        "held",
        "archive: another commit of this step",
        "lustre: on its way",
        "503 SlowDown",
        "60 s ago",
        "last 5 minutes",
        "step 300 (16.0 GB): on",
        "3 files of other nodes are here (24.0 GB)",
        "no room for a copy",
    ];
    for text in expected {
        assert!(page.to_lowercase().contains(&text.to_lowercase()), "no {text:?} in {page}");
    }
    assert!(!page.contains("/actions"), "no buttons for those who may only look");
    assert!(!page.contains("style=\""), "the policy allows no style in attributes");
}

#[test]
fn an_idle_agent_has_a_page_too() {
    let status = Status::default();
    let page = overview(&view(&status, false));
    for text in ["No tiers", "Nothing is under way.", "No checkpoint yet.", "None since"] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn pages_of_many_checkpoints_are_of_one_size() {
    let mut status = busy();
    let step = status.steps[0].clone();
    status.steps = (0..10_000).map(|number| StepStatus { step: number, ..step.clone() }).collect();
    let count = |page| checkpoints(&view(&status, false), page).matches("class=\"step\"").count();
    assert_eq!((count(1), count(200)), (50, 50));
    assert_eq!((count(0), count(usize::MAX)), (50, 50), "there is none, so the nearest");
    assert!(checkpoints(&view(&status, false), 2).contains("2 of 200"));
    assert!(checkpoints(&view(&status, false), 1).contains(">9999<"), "the newest first");
}

#[test]
fn forms_carry_the_second_text() {
    let status = busy();
    let page = overview(&view(&status, true));
    let forms = page.matches("<form").count();
    assert!(forms > 8, "{forms}");
    assert_eq!(page.matches("name=\"form\" value=\"f0rm\"").count(), forms);
    assert!(page.contains("value=\"resume\"") && page.contains("value=\"pause\""));
}
