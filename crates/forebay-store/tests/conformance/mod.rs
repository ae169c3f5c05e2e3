//! One suite for every store: what the interface promises, with races in it.
//!
//! A case is a function of a [`Place`]: an empty store, and how to let time pass in it. [`conformance!`] makes a module
//! with one test a case.

pub(crate) mod basics;
pub(crate) mod data;
pub(crate) mod publish;
pub(crate) mod races;

use std::sync::Arc;
use std::time::Duration;

use forebay_store::Store;

/// An empty store, and what keeps it.
pub(crate) struct Place {
    pub(crate) store: Arc<dyn Store>,
    /// Lets at least this much time pass by the store's clock.
    pub(crate) wait: Box<dyn Fn(Duration) + Send + Sync>,
    pub(crate) _keep: Option<tempfile::TempDir>,
}

#[allow(dead_code, reason = "each test program makes its own kinds of places")]
impl Place {
    /// A store with a real clock.
    pub(crate) fn real(store: impl Store + 'static, keep: tempfile::TempDir) -> Self {
        Self { store: Arc::new(store), wait: Box::new(std::thread::sleep), _keep: Some(keep) }
    }

    /// A store whose times are whole seconds.
    pub(crate) fn in_seconds(store: impl Store + 'static) -> Self {
        let second = Duration::from_millis(2100);
        let wait = Box::new(move |time: Duration| std::thread::sleep(time.max(second)));
        Self { store: Arc::new(store), wait, _keep: None }
    }

    pub(crate) fn put(&self, key: &str, bytes: &[u8]) {
        self.store.put(key, bytes).unwrap();
    }

    /// The bytes of an object that must be there.
    pub(crate) fn bytes(&self, key: &str) -> Vec<u8> {
        self.found(key).unwrap_or_else(|| panic!("{key} is gone"))
    }

    pub(crate) fn found(&self, key: &str) -> Option<Vec<u8>> {
        self.store.get(key, 1 << 20).unwrap().map(|(bytes, _)| bytes)
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let listed = self.store.list("", 1000).unwrap();
        listed.into_iter().map(|line| line.key).collect()
    }
}

/// The whole suite for one kind of store: `conformance!(name, || Place { .. })`.
macro_rules! conformance {
    ($name:ident, $make:expr) => {
        conformance!(@cases $name, $make,
            basics: what_is_put_is_got, versions_tell_states_apart, create_takes_a_free_key_once,
                large_objects_are_not_read, listings_are_sorted_and_bounded,
                names_show_folders_and_are_bounded, removal_is_told_and_leaves_no_folder,
                what_is_discarded_is_gone_with_its_folders,
                keys_that_leave_the_store_are_refused_by_every_call, ages_are_the_stores_own;
            data: ranges_come_in_any_order_from_many_threads, a_key_is_written_by_one,
                what_was_begun_is_gone_on_with,
                what_changes_under_a_reader_is_told, an_object_may_be_empty;
            publish: a_free_key_is_taken, a_taken_key_is_lost, the_expected_version_is_replaced,
                a_stale_version_loses, what_was_withdrawn_is_not_published,
                a_key_that_was_freed_and_taken_again_is_another, folders_may_differ,
                nothing_is_published_onto_itself;
            races: one_of_many_creates_wins, one_of_many_first_publications_wins,
                one_of_many_replacements_wins, replacements_in_a_row_lose_no_update,
                a_withdrawal_and_a_publication_agree, readers_see_old_or_new,
                folders_come_and_go_under_writers, the_same_object_published_twice_is_there,
                a_move_takes_no_replacement_away;
        );
    };
    (@cases $name:ident, $make:expr, $($module:ident: $($case:ident),+;)+) => {
        mod $name {
            use super::*;

            $($(
                #[test]
                fn $case() {
                    let make: fn() -> Option<crate::conformance::Place> = $make;
                    match make() {
                        Some(place) => crate::conformance::$module::$case(&place),
                        None => println!("skipped: the machine has no such place"),
                    }
                }
            )+)+
        }
    };
}
