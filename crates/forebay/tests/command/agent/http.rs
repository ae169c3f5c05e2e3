//! HTTP: who may what, bounds, and what hostile names do.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::{ACT_TOKEN, Agent, LONG, READ_TOKEN, Site, all_there, status_of};
use crate::ckpt_make::State;

const OPEN: &str = "listen = \"127.0.0.1:0\"\naction_token_file = \"act.token\"";

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

fn act(agent: &Agent, token: &str, action: &str) -> (u16, String) {
    let head = format!("{}Content-Type: application/json\r\n", bearer(token));
    agent.http("POST /api/v1/actions", &head, action)
}

#[test]
fn loopback_reads_without_a_token_and_acts_with_one() {
    let site = Site::new("", OPEN);
    site.save("local", &[100, 200], &State::new(1));
    let agent = site.start();
    agent.until(None, "everything everywhere", |status| all_there(status, 2));
    for path in ["/", "/checkpoints", "/metrics", "/healthz", "/api/v1/status", "/style.css"] {
        let (code, answer) = agent.get(path);
        assert_eq!(code, 200, "{path}: {answer}");
        let head = answer.to_ascii_lowercase();
        for line in
            ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff"]
        {
            assert!(head.contains(line), "{path} lacks {line}: {answer}");
        }
        assert!(!head.contains("access-control-"), "no other site may read: {answer}");
    }
    let (_, metrics) = agent.get("/metrics");
    let committed = "forebay_tier_committed_steps{run=\"default\",tier=\"archive\"} 2\n";
    assert!(metrics.contains(committed), "{metrics}");
    let pin = r#"{"action":"pin","step":100,"name":"golden"}"#;
    let (code, answer) =
        agent.http("POST /api/v1/actions", "Content-Type: application/json\r\n", pin);
    assert_eq!(code, 403, "{answer}");
    assert_eq!(act(&agent, "0123456789abcdef-actX", pin).0, 401);
    let (code, answer) = act(&agent, ACT_TOKEN, pin);
    assert_eq!(code, 200, "{answer}");
    let pinned = |status: &forebay_tier::status::Status| status.steps[0].pins == ["golden"];
    agent.until(None, "pinned", pinned);
    assert!(agent.get("/").1.contains("golden"));
    for wrong in ["{}", "[]", "x", r#"{"action":"burn"}"#, r#"{"action":"pin","step":-1}"#] {
        assert_eq!(act(&agent, ACT_TOKEN, wrong).0, 400, "{wrong}");
    }
    // What is no name must not be taken for nobody's: that would be the configured job's.
    for job in ["7", "true", "[\"default\"]", "{}"] {
        let odd = format!("{{\"action\":\"unpin\",\"name\":\"golden\",\"job\":{job}}}");
        assert_eq!(act(&agent, ACT_TOKEN, &odd).0, 400, "{job}");
    }
    agent.until(None, "pinned still", pinned);
    let other = r#"{"action":"wake","job":"other"}"#;
    assert_eq!(act(&agent, ACT_TOKEN, other).0, 404);
    assert_eq!(act(&agent, ACT_TOKEN, r#"{"action":"hold","step":7}"#).0, 404);
    // The agent writes where its tiers are, not where somebody says.
    let away = site.path("away");
    let promote = serde_json::json!({"action": "promote", "step": 100, "name": "x", "to": away});
    assert_eq!(act(&agent, ACT_TOKEN, &promote.to_string()).0, 403);
    assert!(!away.exists());
    assert!(!agent.log().contains("abcdef"), "a token in the log: {}", agent.log());
}

#[test]
fn with_a_token_nothing_is_read_without_it() {
    let site = Site::new("", "listen = \"127.0.0.1:0\"\ntoken_file = \"read.token\"");
    let agent = site.start();
    for path in ["/", "/metrics", "/api/v1/status", "/checkpoints"] {
        let (code, answer) = agent.get(path);
        assert_eq!(code, 401, "{path}");
        assert!(answer.to_ascii_lowercase().contains("www-authenticate: bearer"));
        assert!(!answer.contains("local"), "{answer}");
        let wrong = bearer("0123456789abcdef-reax");
        assert_eq!(agent.http(&format!("GET {path}"), &wrong, "").0, 401);
        let basic = "Authorization: Basic 0123456789abcdef-read\r\n";
        assert_eq!(agent.http(&format!("GET {path}"), basic, "").0, 401);
        assert_eq!(agent.http(&format!("GET {path}"), &bearer(READ_TOKEN), "").0, 200);
    }
    // No token for actions is configured: the one for reading is none.
    let (code, answer) = act(&agent, READ_TOKEN, r#"{"action":"wake"}"#);
    assert_eq!(code, 403);
    assert!(answer.contains("are off"), "{answer}");
    assert_eq!(agent.get("/healthz").0, 200, "a probe needs none, and learns nothing");
}

#[test]
fn a_foreign_name_for_this_machine_is_not_answered() {
    let site = Site::new("", OPEN);
    let agent = site.start();
    let ask = |host: &str| {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        status_of(agent.raw(request.as_bytes())).0
    };
    assert_eq!(ask("localhost:1"), 200);
    assert_eq!(ask("evil.example"), 421);
}

/// The cookie and the form's second text of a session.
fn session(agent: &Agent, token: &str) -> (String, String) {
    let (code, answer) = agent.http("POST /login", "", &format!("token={token}"));
    assert_eq!(code, 303, "{answer}");
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().unwrap());
    let page = agent.http("GET /", &cookie, "").1;
    let form = page.split("name=\"form\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    (cookie, form.to_owned())
}

#[test]
fn forms_act_for_who_logged_in_and_for_no_other_site() {
    let site = Site::with_tls("", OPEN);
    let agent = site.start();
    assert_eq!(agent.http("POST /login", "", "token=0123456789abcdef-actX").0, 401);
    let (cookie, form) = session(&agent, ACT_TOKEN);
    let pause = format!("form={form}&job=default&action=pause&tier=shared");
    let send = |head: &str, body: &str| agent.http("POST /actions", head, body).0;
    let paused = || agent.status(None).tiers[1].paused;
    // Without the second text, without the cookie, from elsewhere: as a page of another site could.
    assert_eq!(send(&cookie, "form=&job=default&action=pause&tier=shared"), 403);
    assert_eq!(send(&cookie, "job=default&action=pause&tier=shared"), 403);
    assert_eq!(send("", &pause), 403);
    let cross = format!("{cookie}Sec-Fetch-Site: cross-site\r\n");
    assert_eq!(send(&cross, &pause), 403);
    assert_eq!(send(&format!("{cookie}Origin: https://evil.example\r\n"), &pause), 403);
    // A cookie alone is none for the API.
    let json = format!("{cookie}Content-Type: application/json\r\n");
    assert_eq!(agent.http("POST /api/v1/actions", &json, r#"{"action":"pause"}"#).0, 403);
    assert!(!paused());
    assert_eq!(send(&cookie, &pause), 303);
    assert!(paused());
    let logout = format!("form={form}");
    assert_eq!(agent.http("POST /logout", &cookie, &logout).0, 303);
    assert_eq!(send(&cookie, &pause), 403, "the session has ended");
}

/// A browser sends the cookies of a host to every port of it: the server of another user on this machine would get it.
#[test]
fn without_tls_a_session_only_looks() {
    let site = Site::new("", &format!("{OPEN}\ntoken_file = \"read.token\""));
    let agent = site.start();
    let (code, answer) = agent.http("POST /login", "", &format!("token={ACT_TOKEN}"));
    assert_eq!(code, 303, "{answer}");
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().unwrap());
    let (code, page) = agent.http("GET /", &cookie, "");
    assert_eq!(code, 200);
    assert!(!page.contains("action=\"/actions\""), "buttons: {page}");
    let form = page.split("name=\"form\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    let pause = format!("form={form}&job=default&action=pause&tier=shared");
    let (code, page) = agent.http("POST /actions", &cookie, &pause);
    assert_eq!(code, 403);
    assert!(page.contains("need TLS"), "{page}");
    assert!(!agent.status(None).tiers[1].paused);
}

#[test]
fn the_audit_log_says_from_where_and_by_what() {
    let site = Site::with_tls("", OPEN);
    let config = std::fs::read_to_string(&site.config).unwrap();
    let config = config.replace("[tiers]\n", "[tiers]\naudit_log = \"audit.log\"\n");
    std::fs::write(&site.config, config).unwrap();
    let agent = site.start();
    assert_eq!(act(&agent, ACT_TOKEN, r#"{"action":"pause","tier":"shared"}"#).0, 200);
    let (cookie, form) = session(&agent, ACT_TOKEN);
    let resume = format!("form={form}&job=default&action=resume&tier=shared");
    assert_eq!(agent.http("POST /actions", &cookie, &resume).0, 303);
    agent.client().act(None, &serde_json::json!({"action": "pause", "tier": "archive"})).unwrap();
    // It is written behind what happens.
    let (start, mut who) = (Instant::now(), Vec::new());
    while who.len() < 3 {
        assert!(start.elapsed() < LONG, "{who:?}: {}", agent.log());
        who.clear();
        forebay_tier::audit_log::verify(&site.path("audit.log"), None, |record| {
            who.push(record.event.who.clone());
            Ok(())
        })
        .unwrap();
    }
    let [bearer, button, local] = who.as_slice() else { panic!("{who:?}") };
    assert_eq!(bearer, "http 127.0.0.1 bearer");
    let name = button.strip_prefix("http 127.0.0.1 session ").unwrap();
    assert_eq!(name.len(), 8, "{button}");
    assert!(agent.log().lines().any(|line| line.contains("logged in") && line.contains(name)));
    assert!(!cookie.contains(name), "a log tells secrets");
    let own = rustix::process::geteuid().as_raw();
    assert_eq!(*local, format!("uid {own} pid {}", std::process::id()));
}

#[test]
fn promotions_keep_nobody_from_looking_and_pausing() {
    // 16 MB at 1 MB/s each.
    let site = Site::new("write_limit = \"1 MB/s\"", OPEN);
    site.save("local", &[1], &State::new(1).with_rows(4096));
    let agent = site.start();
    agent.until(None, "seen", |status| !status.steps.is_empty());
    let promote = |name: usize| {
        let body =
            format!("{{\"action\":\"promote\",\"step\":1,\"name\":\"p{name}\",\"to\":\"shared\"}}");
        let mut stream = agent.connect();
        let request = format!(
            "POST /api/v1/actions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{}\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            bearer(ACT_TOKEN),
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let mut under_way: Vec<_> = (0..12).map(promote).collect();
    let start = Instant::now();
    for path in ["/", "/api/v1/status", "/metrics"] {
        assert_eq!(agent.get(path).0, 200, "{path}");
    }
    assert_eq!(act(&agent, ACT_TOKEN, r#"{"action":"pause"}"#).0, 200);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // Those beyond the fourth are refused at once; the others take longer than anybody waits.
    let mut codes = Vec::new();
    for stream in &mut under_way {
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        codes.push(status_of(answer).0);
    }
    codes.sort_unstable();
    assert_eq!(codes, [[202; 4].as_slice(), &[503; 8]].concat());
}

#[test]
fn what_is_too_large_or_odd_is_refused() {
    let site = Site::new("", OPEN);
    let agent = site.start();
    let body = format!("{{\"action\":\"wake\",\"x\":\"{}\"}}", "y".repeat(80_000));
    assert_eq!(act(&agent, ACT_TOKEN, &body).0, 413);
    let mut chunked = format!(
        "POST /api/v1/actions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{}\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        bearer(ACT_TOKEN)
    );
    for _ in 0..20 {
        chunked.push_str(&format!("2000\r\n{}\r\n", "z".repeat(0x2000)));
    }
    assert_eq!(status_of(agent.raw(format!("{chunked}0\r\n\r\n").as_bytes())).0, 413);
    let large = agent.raw(
        format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "a".repeat(100_000))
            .as_bytes(),
    );
    assert!(large.is_empty() || status_of(large.clone()).0 == 431, "{large:.200}");
    let lines: String = (0..500).map(|number| format!("X{number}: y\r\n")).collect();
    let many = agent.raw(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n").as_bytes());
    assert!(many.is_empty() || status_of(many.clone()).0 == 431, "{many:.200}");
    assert_eq!(agent.get("/none").0, 404);
    assert_eq!(agent.get("/../../etc/passwd").0, 404);
    assert_eq!(agent.http("DELETE /", "", "").0, 405);
    assert_eq!(agent.http("POST /metrics", "", "x").0, 405);
    let text = "Content-Type: text/plain\r\n".to_owned() + &bearer(ACT_TOKEN);
    assert_eq!(agent.http("POST /api/v1/actions", &text, r#"{"action":"wake"}"#).0, 415);
    assert_eq!(agent.get("/").0, 200, "it goes on");
}

#[test]
fn one_address_does_not_take_all_places() {
    let site = Site::new("", OPEN);
    let agent = site.start();
    let held: Vec<_> = (0..64).map(|_| agent.connect()).collect();
    let mut more = agent.connect();
    let mut byte = [0];
    assert!(matches!(more.read(&mut byte), Ok(0) | Err(_)), "it is closed");
    let (_, metrics) = {
        drop(held);
        let start = Instant::now();
        loop {
            if let Some(answer) = agent.try_http("GET /metrics", "", "") {
                break answer;
            }
            assert!(start.elapsed() < LONG, "never let in again");
        }
    };
    let denied = metrics.lines().find_map(|line| line.strip_prefix("forebay_agent_denied_total "));
    assert!(denied.unwrap().parse::<u64>().unwrap() >= 1, "{denied:?}");
}

#[test]
fn slow_clients_are_left() {
    let site = Site::new("", OPEN);
    let agent = site.start();
    let address = agent.http.unwrap();
    // A head that does not end, and a body that does not come.
    let post = format!(
        "POST /api/v1/actions HTTP/1.1\r\nHost: localhost\r\n{}Content-Type: application/json\r\n\
         Content-Length: 10\r\n\r\n{{",
        bearer(ACT_TOKEN)
    );
    let slow = |sent: String| {
        std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            stream.write_all(sent.as_bytes()).unwrap();
            let (start, mut answer) = (Instant::now(), String::new());
            let _ = stream.read_to_string(&mut answer);
            (start.elapsed(), answer)
        })
    };
    let (head, body) = (slow("GET / HTTP/1.1\r\nHost: l".to_owned()), slow(post));
    // Meanwhile others are answered.
    assert_eq!(agent.get("/").0, 200);
    for client in [head, body] {
        let (time, answer) = client.join().unwrap();
        assert!(time > Duration::from_secs(5) && time < Duration::from_secs(30), "{time:?}");
        assert!(answer.is_empty() || answer.contains(" 408 "), "{answer}");
    }
}

#[test]
fn tls_with_a_certificate_of_ones_own() {
    let site = Site::with_tls("", "listen = \"0.0.0.0:0\"\ntoken_file = \"read.token\"");
    let agent = site.start();
    let port = agent.http.unwrap().port();
    let ask = |head: &str| agent.http("GET /api/v1/status", head, "");
    assert_eq!(ask("").0, 401);
    let (code, answer) = ask(&bearer(READ_TOKEN));
    assert_eq!(code, 200);
    assert!(answer.to_ascii_lowercase().contains("strict-transport-security:"), "{answer}");
    // Who speaks no TLS there gets nothing.
    let mut plain = TcpStream::connect(("127.0.0.1", port)).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
}

/// As a cluster renews them: replaced one by one, while the agent runs.
#[test]
fn tokens_and_certificates_that_are_replaced_count_without_a_restart() {
    let mut site = Site::with_tls("", &format!("{OPEN}\ntoken_file = \"read.token\""));
    let mut agent = site.start();
    let (cookie, _) = session(&agent, ACT_TOKEN);
    let old = agent.tls.clone();
    site.certify();
    agent.tls = site.tls.clone();
    let answers = |agent: &Agent, head: &str| {
        // One that is not trusted gives no answer at all.
        agent.try_http("GET /api/v1/status", head, "").map(|answer| answer.0)
    };
    let until = |agent: &Agent, head: &str, code: Option<u16>| {
        let start = Instant::now();
        while answers(agent, head) != code {
            assert!(start.elapsed() < LONG, "never {code:?}: {}", agent.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    until(&agent, &bearer(READ_TOKEN), Some(200));
    assert_eq!(answers(&agent, &cookie), Some(200), "the tokens are the same");
    let replace = |token: &str| {
        super::private(&site.path("new"), token);
        std::fs::rename(site.path("new"), site.path("read.token")).unwrap();
    };
    replace("0123456789abcdef-new");
    until(&agent, &bearer("0123456789abcdef-new"), Some(200));
    assert_eq!(answers(&agent, &bearer(READ_TOKEN)), Some(401));
    assert_eq!(answers(&agent, &cookie), Some(401), "sessions end with the tokens");
    // Nonsense changes nothing.
    replace("short");
    let start = Instant::now();
    while !agent.log().contains("stay as they were") {
        assert!(start.elapsed() < LONG, "{}", agent.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(answers(&agent, &bearer("0123456789abcdef-new")), Some(200));
    agent.tls = old;
    assert_eq!(answers(&agent, &bearer("0123456789abcdef-new")), None, "the old certificate");
}

#[test]
fn hostile_names_stay_text() {
    let hostile = "<img src=x onerror=alert(1)>\"'&";
    let site = Site::with_tls("", OPEN);
    site.save("local", &[1], &State::new(1));
    // A folder of that name, and a bad step, so that an error quotes names.
    std::fs::create_dir(site.path("local").join(hostile)).unwrap();
    let step = site.path("local").join(forebay_checkpoint::commit::step_folder(2));
    std::fs::create_dir(&step).unwrap();
    std::fs::write(step.join(".metadata"), hostile).unwrap();
    let agent = site.start();
    agent.until(None, "one step everywhere", |status| {
        status.steps.iter().any(|step| {
            step.copies.iter().all(|copy| *copy == forebay_tier::status::CopyState::Committed)
        })
    });
    let pin = serde_json::json!({"action": "pin", "step": 1, "name": hostile}).to_string();
    let (code, answer) = act(&agent, ACT_TOKEN, &pin);
    assert!(code >= 400, "{code}");
    // As JSON it is quoted; no type that a browser would render.
    assert!(answer.to_ascii_lowercase().contains("content-type: application/json"), "{answer}");
    let (cookie, form) = session(&agent, ACT_TOKEN);
    let encoded: String = hostile.bytes().map(|byte| format!("%{byte:02x}")).collect();
    for body in [
        format!("form={form}&job=default&action=pin&step=1&name={encoded}"),
        format!("form={form}&job={encoded}&action=wake"),
        format!("form={form}&job=default&action=pause&tier={encoded}"),
    ] {
        let (code, page) = agent.http("POST /actions", &cookie, &body);
        assert!(code >= 400, "{body}");
        assert!(!page.contains("<img"), "{page}");
    }
    for path in
        ["/", "/checkpoints", &format!("/?job={encoded}"), &format!("/checkpoints?page={encoded}")]
    {
        let (_, page) = agent.http(&format!("GET {path}"), &cookie, "");
        assert!(!page.contains("<img"), "{path}: {page}");
    }
    let (_, metrics) = agent.get("/metrics");
    assert!(metrics.lines().all(|line| line.starts_with("forebay_")
        || line.starts_with('#')
        || !line.contains("<img")));
}
